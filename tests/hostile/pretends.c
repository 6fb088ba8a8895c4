/* SPDX-License-Identifier: Apache-2.0
 *
 * In the place of ldconfig: says what it may, writes that as the cache. What the file /asks begins
 * with decides what else it does: a call that a sandbox ends it for, nothing for ever, or to fail.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

extern char **environ;

static const char *is(int failed)
{
	return failed < 0 ? strerrorname_np(errno) : "done";
}

static const char *call(char what)
{
	switch (what) {
	case 'm':
		return is(mount("x", "/etc", "tmpfs", 0, ""));
	case 'c':
		return is(chroot("/etc"));
	case 'h':
		return is(sethostname("x", 1));
	case 'k':
		return is(mknod("/node", S_IFCHR | 0600, 0x103));
	case 'u':
		return is(setuid(7));
	case 's':
		return is(socket(AF_UNIX, SOCK_STREAM, 0));
	}
	return "none";
}

int main(int argc, char **argv)
{
	FILE *output = fopen(argv[argc - 1], "we");
	int asks = open("/asks", O_RDONLY | O_CLOEXEC);
	int variables = 0, descriptors = 0;
	char what = 0;

	if (output == NULL)
		return 9;
	if (asks >= 0 && (read(asks, &what, 1) != 1 || close(asks) != 0))
		return 8;
	while (environ[variables] != NULL)
		variables++;
	for (int fd = 0; fd < 64; fd++)
		descriptors += fd != fileno(output) && fcntl(fd, F_GETFD) >= 0;
	fprintf(output, "seen environ=%d fds=%d", variables, descriptors);
	fprintf(output, " write=%s", is(open("/etc/new", O_CREAT | O_WRONLY | O_CLOEXEC, 0644)));
	fprintf(output, " mkdir=%s", is(mkdir("/new", 0755)));
	fprintf(output, " self=%s", is(open("/proc/self/exe", O_RDONLY | O_CLOEXEC)));
	fprintf(output, " call=%s", call(what));
	fclose(output);
	for (volatile char waits = what; waits == 'w';)
		;
	return what == 'f' ? 7 : 0;
}
