/* SPDX-License-Identifier: Apache-2.0
 *
 * The launcher's parsers on input from a file, under the sanitisers: `harness FILE`.
 *
 * A case is a letter, the number of its bytes as four bytes, and the bytes. 'a': a command line, a
 * NUL behind each word; prints what is understood. 'c': the end of a companion file; prints the
 * candidates, or - . Each is copied to the heap, so that a byte read beside it is reported.
 */

#define LAUNCHER_TWIN
#include "../../gpuruntime/launcher/launcher.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void read_words(const char *data, size_t size)
{
	size_t count = 0, place = 0;
	char **words;
	struct command command;

	for (size_t i = 0; i < size; i++)
		count += data[i] == '\0';
	words = calloc(count + 1, sizeof *words);
	for (size_t i = 0; i < count; i++) {
		words[i] = strdup(data + place);
		place += strlen(data + place) + 1;
	}
	command = parse(words);
	printf("%d %d %d\n", command.understood, command.creates, command.version);
	for (size_t i = 0; i < count; i++)
		free(words[i]);
	free(words);
}

static void read_companion_end(const char *data, size_t size)
{
	char *line = malloc(size + 1);
	/* As in the launcher: the names go to the beginning of the buffer that holds the lines. */
	static const char head[] = "gpuruntime-launcher 1\n";
	char *buffer = malloc(sizeof head + size);

	memcpy(line, data, size);
	line[size] = '\0';
	memcpy(buffer, head, sizeof head - 1);
	memcpy(buffer + sizeof head - 1, line, size + 1);
	if (read_candidates(buffer + sizeof head - 1, buffer)) {
		for (const char *name = buffer; *name != '\0'; name += strlen(name) + 1)
			printf("%s%s", name == buffer ? "" : " | ", name);
		printf("\n");
	} else {
		printf("-\n");
	}
	free(line);
	free(buffer);
}

int main(int argc, char **argv)
{
	FILE *input = fopen(argc > 1 ? argv[1] : "", "rb");
	unsigned char head[5];

	(void)launch;
	if (input == NULL)
		return 2;
	while (fread(head, 1, sizeof head, input) == sizeof head) {
		size_t size = (size_t)head[1] | (size_t)head[2] << 8 | (size_t)head[3] << 16 | (size_t)head[4] << 24;
		char *data = malloc(size + 1);

		if (fread(data, 1, size, input) != size)
			return 3;
		data[size] = '\0';
		if (head[0] == 'a')
			read_words(data, size);
		else
			read_companion_end(data, size);
		free(data);
	}
	fclose(input);
	return 0;
}
