/* SPDX-License-Identifier: Apache-2.0
 *
 * Starts a program the way an engine, or an unfriendly parent, may start it.
 *
 * caller HABIT... -- PROGRAM ARGV0 ARGS...     (each habit is a name of the table below)
 * Everything that no habit changes is inherited; the program is exec'd, not forked.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

extern char **environ;

static int without_arguments;

static void need(int ok, const char *what)
{
	if (ok)
		return;
	fprintf(stderr, "caller: %s: %s\n", what, strerror(errno));
	exit(90);
}

/* Moves *fd* to *wanted*, inheritable. */
static void place(int fd, int wanted)
{
	need(fd >= 0, "descriptor");
	if (fd == wanted)
		return;
	need(dup2(fd, wanted) == wanted, "dup2");
	close(fd);
}

/* 3, 4: listening sockets as LISTEN_FDS=2 passes them; 5: file at an offset; 6: console socket;
 * 7: read end of a pipe, not blocking. */
static void engine_fds(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int ends[2];
	int pair[2];

	for (int fd = 3; fd < 5; fd++) {
		int listener = socket(AF_UNIX, SOCK_STREAM, 0);

		need(bind(listener, (struct sockaddr *)&address, sizeof address.sun_family) == 0, "bind");
		need(listen(listener, 1) == 0, "listen");
		place(listener, fd);
	}
	place(open("/proc/self/exe", O_RDONLY), 5);
	need(lseek(5, 7, SEEK_SET) == 7, "lseek");
	need(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0, "socketpair");
	place(pair[0], 6);
	need(pipe(ends) == 0, "pipe");
	place(ends[0], 7);
	need(fcntl(7, F_SETFL, O_NONBLOCK) == 0, "fcntl");
	for (int fd = 8; fd < 64; fd++)
		close(fd);
}

/* Names twice, an entry without "=", an empty one, bytes that are no UTF-8, what Python reads. */
static void odd_environment(void)
{
	static char *odd[] = {
		"TWICE=first", "NOEQUALS", "", "BYTES=\xff\xfe\x80", "TWICE=second", "=empty name", "LISTEN_FDS=2",
		"LISTEN_PID=1", "SPACE= a\nb\t", "PYTHONHOME=/nonexistent", "PYTHONPATH=/nonexistent", "PYTHONSTARTUP=x",
		"LC_CTYPE=", "EMPTY=", NULL,
	};
	static char *merged[512];
	size_t count = 0;

	for (char **entry = environ; *entry != NULL && count < 400; entry++)
		merged[count++] = *entry;
	for (char **entry = odd; *entry != NULL; entry++)
		merged[count++] = *entry;
	environ = merged;
}

/* PATH again, behind the entry that counts. */
static void second_path(void)
{
	static char *merged[512];
	size_t count = 0;

	for (char **entry = environ; *entry != NULL && count < 400; entry++)
		merged[count++] = *entry;
	merged[count] = "PATH=/nonexistent";
	environ = merged;
}

static void ignore_signals(void)
{
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN);
	signal(SIGCHLD, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
}

static void ignore_pipe(void)
{
	signal(SIGPIPE, SIG_IGN);
}

static void block_some(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGRTMIN + 3);
	sigprocmask(SIG_SETMASK, &set, NULL);
}

static void block_all(void)
{
	sigset_t set;

	sigfillset(&set);
	sigprocmask(SIG_SETMASK, &set, NULL);
}

static void limit(int resource, rlim_t soft, rlim_t hard)
{
	const struct rlimit value = {soft, hard};

	need(setrlimit(resource, &value) == 0, "setrlimit");
}

static void odd_limits(void)
{
	limit(RLIMIT_NOFILE, 200, 333);
	limit(RLIMIT_CORE, 0, 4096);
	limit(RLIMIT_STACK, 3 << 20, 7 << 20);
	limit(RLIMIT_FSIZE, 1 << 28, 1 << 29);
}

static void few_files(void)
{
	limit(RLIMIT_NOFILE, 8, 8);
}

static void small_stack(void)
{
	limit(RLIMIT_STACK, 64 << 10, 64 << 10);
}

static void many_fds(void)
{
	int fd = open("/dev/zero", O_RDWR);

	need(fd >= 0, "open");
	for (int wanted = 3; wanted < 1024; wanted++)
		need(dup2(fd, wanted) == wanted, "dup2");
	if (fd > 1023)
		close(fd);
}

static void no_stdin(void)
{
	close(0);
}

static void no_stdio(void)
{
	close(0);
	close(1);
	close(2);
}

/* Standard output is a pipe that nobody reads and that holds no byte more. */
static void full_stdout(void)
{
	static const char page[4096];
	int ends[2];

	need(pipe(ends) == 0, "pipe");
	need(fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0, "fcntl");
	while (write(ends[1], page, sizeof page) > 0)
		continue;
	place(ends[1], 1);
}

static void deleted_directory(void)
{
	char name[] = "/tmp/caller-XXXXXX";

	need(mkdtemp(name) != NULL, "mkdtemp");
	need(chdir(name) == 0, "chdir");
	need(rmdir(name) == 0, "rmdir");
}

static void umask_none(void)
{
	umask(0777);
}

static void umask_odd(void)
{
	umask(0135);
}

static void death_signal(void)
{
	need(prctl(PR_SET_PDEATHSIG, SIGUSR2) == 0, "prctl");
}

static void own_session(void)
{
	need(setsid() >= 0, "setsid");
}

static void no_arguments(void)
{
	without_arguments = 1;
}

static const struct habit {
	const char *name;
	void (*take)(void);
} HABITS[] = {
	{"block-all", block_all},
	{"block-some", block_some},
	{"death-signal", death_signal},
	{"deleted-directory", deleted_directory},
	{"engine-fds", engine_fds},
	{"few-files", few_files},
	{"full-stdout", full_stdout},
	{"ignore-pipe", ignore_pipe},
	{"ignore-signals", ignore_signals},
	{"many-fds", many_fds},
	{"no-arguments", no_arguments},
	{"no-stdin", no_stdin},
	{"no-stdio", no_stdio},
	{"odd-environment", odd_environment},
	{"odd-limits", odd_limits},
	{"own-session", own_session},
	{"second-path", second_path},
	{"small-stack", small_stack},
	{"umask-none", umask_none},
	{"umask-odd", umask_odd},
};

static void take(const char *name)
{
	for (size_t i = 0; i < sizeof HABITS / sizeof *HABITS; i++) {
		if (strcmp(HABITS[i].name, name) == 0) {
			HABITS[i].take();
			return;
		}
	}
	fprintf(stderr, "caller: no habit \"%s\"\n", name);
	exit(90);
}

int main(int argc, char **argv)
{
	static char *nothing[] = {NULL};
	int at = 1;

	while (at < argc && strcmp(argv[at], "--") != 0) {
		take(argv[at]);
		at++;
	}
	if (argc < at + 3)
		return 90;
	execve(argv[at + 1], without_arguments ? nothing : argv + at + 2, environ);
	need(0, "execve");
	return 90;
}
