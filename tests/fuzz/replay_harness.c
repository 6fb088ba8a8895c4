/* SPDX-License-Identifier: Apache-2.0
 *
 * The launcher's reader of JSON and what it does with answers, under the sanitisers: `harness FILE`.
 *
 * A case is a letter, the number of its bytes as four bytes, and the bytes:
 *   j  a document; prints it as it is read, or -
 *   r  a document, a NUL, and an answer file behind its head; prints what the document becomes, or -
 *   p  operation, argument and expected answer as fields; prints whether it holds
 * Input is copied to the heap, so that a byte read beside it is reported.
 */

#define LAUNCHER_TWIN
#include "../../gpuruntime/launcher/launcher.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char **environ;

static struct replay replay;

static void read_json(const char *data, size_t size)
{
	struct json *json = malloc(sizeof *json);

	json->bytes = malloc(size + 1);
	memcpy(json->bytes, data, size);
	json->bytes[size] = '\0';
	if (read_document(json, size))
		printf("%.*s\n", (int)json->out, json->bytes);
	else
		printf("-\n");
	free(json->bytes);
	free(json);
}

static void answer_again(const char *data, size_t size)
{
	const size_t length = strnlen(data, size);
	const size_t rest = size > length ? size - length - 1 : 0;
	char *file = malloc(rest + 1);
	bool found = false;

	memcpy(file, data + size - rest, rest);
	if (length < sizeof replay.document) {
		memcpy(replay.document, data, length);
		replay.document[length] = '\0';
		found = read_container(&replay, length)
			&& find_answer(&replay, (struct slice){file, rest}, "gpu-container-runtime", environ);
	}
	fflush(stdout);
	printf(found && write_document(&replay, 1) ? "\n" : "-\n");
	free(file);
}

static void ask_host(const char *data, size_t size)
{
	printf("%d\n", fits_host((struct fields){data, data + size, false}, environ));
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
		if (head[0] == 'j')
			read_json(data, size);
		else if (head[0] == 'r')
			answer_again(data, size);
		else
			ask_host(data, size);
		free(data);
	}
	fclose(input);
	return 0;
}
