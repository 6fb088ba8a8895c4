/* SPDX-License-Identifier: Apache-2.0
 *
 * The launcher's parsers on input from a file, under the sanitisers: `harness FILE`.
 *
 * A case is a letter, the number of its bytes as four bytes, and the bytes:
 *   a  a command line, a NUL behind each word; prints what is understood of it
 *   c  a companion file behind its head; prints the runtimes and the words, or -
 *   i  an interpreter file; prints its parts, or -
 *   w  words, a NUL behind each and one more, and a config.json; prints whether it may ask
 * Each is copied to the heap, so that a byte read beside it is reported.
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
	printf("%d %d %d %d", command.understood, command.creates, command.version, command.plain);
	if (command.plain)
		printf(" %s %s", command.bundle ? command.bundle : "~", command.config ? command.config : "~");
	printf("\n");
	for (size_t i = 0; i < count; i++)
		free(words[i]);
	free(words);
}

static void print_list(const char *names)
{
	for (const char *name = names; *name != '\0'; name += strlen(name) + 1)
		printf("%s%s", name == names ? "" : " | ", name);
}

static void read_companion_end(const char *data, size_t size)
{
	/* As in the launcher: the names go to the beginning of the buffer that holds the lines. */
	static const char head[] = "gpuruntime-launcher 3\n";
	char *buffer = malloc(sizeof head + size);
	struct companion companion = {NULL, NULL, NULL};

	memcpy(buffer, head, sizeof head - 1);
	memcpy(buffer + sizeof head - 1, data, size + 1);
	if (read_lists(buffer + sizeof head - 1, buffer, &companion)) {
		print_list(companion.runtimes);
		printf(" ; ");
		if (companion.triggers != NULL)
			print_list(companion.triggers);
		else
			printf("-");
		printf("\n");
	} else {
		printf("-\n");
	}
	free(buffer);
}

static void read_interpreter_file(const char *data)
{
	struct interpreter *interpreter = calloc(1, sizeof *interpreter);

	clear(&home);
	append(&home, "/h/");
	if (read_interpreter(data, interpreter)) {
		const char *word = interpreter->words.bytes;

		printf("%s", interpreter->library.bytes);
		for (size_t i = 0; i < interpreter->count; i++) {
			printf(" | %s", word);
			word += strlen(word) + 1;
		}
		printf(" ; %s\n", interpreter->slow.bytes);
	} else {
		printf("-\n");
	}
	free(interpreter);
}

static void look_for(const char *data, size_t size)
{
	struct triggers *triggers = calloc(1, sizeof *triggers);
	const char *text = data;
	char *bytes;
	bool known = learn(triggers, data);

	while (*text != '\0')
		text += strlen(text) + 1;
	text++;
	size -= (size_t)(text - data);
	/* Exactly what there has to be behind the text. */
	bytes = malloc(size + BEHIND);
	memcpy(bytes, text, size);
	printf("%d\n", known ? found_in(triggers, bytes, size) : -1);
	free(bytes);
	free(triggers);
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
		else if (head[0] == 'c')
			read_companion_end(data, size);
		else if (head[0] == 'i')
			read_interpreter_file(data);
		else
			look_for(data, size);
		free(data);
	}
	fclose(input);
	return 0;
}
