/* SPDX-License-Identifier: Apache-2.0
 *
 * What the launcher does with the files of replays, under the sanitisers: `harness FILE WORD...`.
 *
 * A case is a letter, the number of its bytes as four bytes, and the bytes:
 *   n  a document; prints its number
 *   r  a document, a NUL, and a file behind its head; prints what the document becomes, or -
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
/* The words, each ended by a NUL and the last by two. */
static char words[4096];

static bool load(const char *data, size_t length)
{
	if (length >= sizeof replay.document)
		return false;
	memcpy(replay.document, data, length);
	replay.document[length] = '\0';
	replay.length = length;
	return true;
}

static void number(const char *data, size_t size)
{
	printf("%llu\n", load(data, size) ? (unsigned long long)number_of(&replay, words) : 0);
}

static void repeat(const char *data, size_t size)
{
	const size_t length = strnlen(data, size);
	const size_t rest = size > length ? size - length - 1 : 0;
	char *file = malloc(rest + 1);

	memcpy(file, data + size - rest, rest);
	if (load(data, length) && apply(&replay, (struct slice){file, rest}, "gpu-container-runtime", environ, words))
		printf("%.*s\n", (int)replay.result_length, replay.result);
	else
		printf("-\n");
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
	size_t end = 0;

	(void)launch;
	for (int i = 2; i < argc && end + strlen(argv[i]) + 2 < sizeof words; i++) {
		strcpy(words + end, argv[i]);
		end += strlen(argv[i]) + 1;
	}
	if (input == NULL)
		return 2;
	while (fread(head, 1, sizeof head, input) == sizeof head) {
		size_t size = (size_t)head[1] | (size_t)head[2] << 8 | (size_t)head[3] << 16 | (size_t)head[4] << 24;
		char *data = malloc(size + 1);

		if (fread(data, 1, size, input) != size)
			return 3;
		data[size] = '\0';
		if (head[0] == 'n')
			number(data, size);
		else if (head[0] == 'r')
			repeat(data, size);
		else
			ask_host(data, size);
		free(data);
	}
	fclose(input);
	return 0;
}
