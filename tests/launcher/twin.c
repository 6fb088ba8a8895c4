/* SPDX-License-Identifier: Apache-2.0
 *
 * The launcher as an ordinary program, so that the sanitisers can watch it.
 *
 * The arguments are copied to the heap, each string in an allocation of its own, with exactly the
 * room before argv[0] that launch() is promised: a byte read or written beside them is reported.
 */

#define LAUNCHER_TWIN
#include "../../gpuruntime/launcher/launcher.c"

#include <stdlib.h>
#include <string.h>

extern char **environ;

/* Copies a list of strings behind *room* spare pointers; returns the first. */
static char **copy(char **list, size_t room)
{
	size_t count = 0;
	char **copied;

	while (list[count] != NULL)
		count++;
	copied = malloc((room + count + 1) * sizeof *copied);
	if (copied == NULL)
		abort();
	copied += room;
	for (size_t i = 0; i < count; i++)
		copied[i] = strdup(list[i]);
	copied[count] = NULL;
	return copied;
}

int main(int argc, char **argv)
{
	(void)argc;
	launch(copy(argv, ROOM), copy(environ, 0));
}
