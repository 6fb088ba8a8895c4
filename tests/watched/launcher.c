/* SPDX-License-Identifier: Apache-2.0
 *
 * The launcher, watched: before it passes on a create, WATCHER looks at the same bytes; before it
 * puts an answer in place of config.json, at both.
 *
 * WATCHER is a program of Python's; what it refuses is not passed on: exit 70. The simulated host
 * has this in place of the launcher (tests/simhost/namespace.py), so that the tests that start
 * containers there prove of each of them that the shim would have changed nothing, or the same.
 */

#include "../../gpuruntime/launcher/kernel.h"

#define LAUNCHER_TWIN
#define call watched
static long watched(long number, long a, long b, long c, long d, long e);
#include "../../gpuruntime/launcher/launcher.c"
#undef call

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
/* What we were called with, which start_python() shifts and pass_through() does not. */
static char **given;
static const char *called;
/* What the launcher has written beside config.json, NULL before. */
static const char *written;

/* Becomes the watcher, with all that we were called with as its arguments. */
static void watch(void)
{
	static const char *const words[] = {PYTHON, "-I", "-S", "-B", "-X", "utf8", WATCHER};
	const size_t count = sizeof words / sizeof *words;
	size_t all = 0;
	char **list;
	const int null = open("/dev/null", O_RDWR);

	dup2(null, 0);
	dup2(null, 1);
	while (given[all] != NULL)
		all++;
	list = calloc(count + all + 1, sizeof *list);
	for (size_t i = 0; i < count; i++)
		list[i] = (char *)(uintptr_t)words[i];
	memcpy(list + count, given, all * sizeof *list);
	list[count] = (char *)(uintptr_t)called;
	if (written != NULL)
		setenv("WATCHED_ANSWER", written, 1);
	execve(PYTHON, list, environ);
	perror("watched launcher: " PYTHON);
	_exit(1);
}

/* Waits for what the watcher says, and leaves nothing of its end to the low-level runtime. */
static bool allowed(void)
{
	struct sigaction by_default = {.sa_handler = SIG_DFL}, engines;
	sigset_t one, pending;
	int status = -1;
	pid_t child;

	sigaction(SIGCHLD, &by_default, &engines);
	child = fork();
	if (child == 0)
		watch();
	if (child > 0)
		waitpid(child, &status, 0);
	sigemptyset(&one);
	sigaddset(&one, SIGCHLD);
	sigpending(&pending);
	if (sigismember(&pending, SIGCHLD))
		sigwaitinfo(&one, NULL);
	sigaction(SIGCHLD, &engines, NULL);
	return status == 0;
}

/* The system call itself, but for the exec of what a create is passed on to, and for the one that
 * puts another config.json in the place of the engine's. */
static long watched(long number, long a, long b, long c, long d, long e)
{
	if (number == SYS_renameat) {
		written = (const char *)b;
		if (!allowed())
			_exit(70);
		written = NULL;
	}
	if (number == SYS_execve && (char **)b == given && parse(given + 1).creates && !allowed())
		_exit(70);
	return call(number, a, b, c, d, e);
}

/* Copies a list of strings behind *room* spare pointers; returns the first. */
static char **copy(char **list, size_t room)
{
	size_t count = 0;
	char **copied;

	while (list[count] != NULL)
		count++;
	copied = calloc(room + count + 1, sizeof *copied);
	if (copied == NULL)
		abort();
	copied += room;
	memcpy(copied, list, count * sizeof *copied);
	return copied;
}

int main(int argc, char **argv)
{
	(void)argc;
	given = copy(argv, ROOM);
	called = given[0];
	launch(given, environ);
}
