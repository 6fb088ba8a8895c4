/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that writes down in which state it was started, and exits 0.
 *
 * It stands in for the low-level runtime or for Python.  The record goes to the file named by the
 * variable RECORDER_OUT, else beside the program, as "PROGRAM.record" (a hook has no variable of ours).
 * Format: for each part "@NAME LENGTH\n", LENGTH raw bytes, "\n".
 * Build: cc -static -O1 -o runc recorder.c
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

static char *record;
static size_t record_length;
static FILE *out;

/* Adds one part to the record. */
static void part(const char *name, const char *bytes, size_t length)
{
	fprintf(out, "@%s %zu\n", name, length);
	fwrite(bytes, 1, length, out);
	fputc('\n', out);
}

/* Returns all bytes of the file, which the caller frees; "?" if it cannot be read. */
static char *slurp(const char *path, size_t *length)
{
	size_t room = 1 << 16;
	char *bytes = malloc(room);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t count;

	*length = 0;
	while (fd >= 0 && (count = read(fd, bytes + *length, room - *length)) > 0) {
		*length += (size_t)count;
		if (*length == room) {
			room *= 2;
			bytes = realloc(bytes, room);
		}
	}
	if (fd >= 0)
		close(fd);
	else
		bytes[(*length)++] = '?';
	return bytes;
}

/* Adds a whole file of /proc/self as a part. */
static void file(const char *name)
{
	char path[64];
	size_t length;
	char *bytes;

	snprintf(path, sizeof path, "/proc/self/%s", name);
	bytes = slurp(path, &length);
	part(name, bytes, length);
	free(bytes);
}

/* Adds where a link of /proc/self points as a part. */
static void link_target(const char *name)
{
	char path[64], target[4096];
	ssize_t length;

	snprintf(path, sizeof path, "/proc/self/%s", name);
	length = readlink(path, target, sizeof target);
	part(name, target, length < 0 ? 0 : (size_t)length);
}

/* Adds one line for each open descriptor: number, pos, flags, what it is. */
static void descriptors(void)
{
	char *lines;
	size_t used;
	FILE *list = open_memstream(&lines, &used);
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;

	while (dir != NULL && (entry = readdir(dir)) != NULL) {
		char path[300], target[4096];
		ssize_t length;
		long long pos = -1;
		unsigned int flags = 0;
		size_t ignored;
		char *info;

		if (entry->d_name[0] == '.' || atoi(entry->d_name) == dirfd(dir))
			continue;
		snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
		length = readlink(path, target, sizeof target - 1);
		target[length < 0 ? 0 : length] = '\0';
		snprintf(path, sizeof path, "/proc/self/fdinfo/%s", entry->d_name);
		info = slurp(path, &ignored);
		info[ignored < 60000 ? ignored : 60000] = '\0';
		sscanf(info, "pos: %lld flags: %o", &pos, &flags);
		free(info);
		fprintf(list, "%s %lld %o %s\n", entry->d_name, pos, flags, target);
	}
	if (dir != NULL)
		closedir(dir);
	else
		fputs("unreadable\n", list);
	fclose(list);
	part("fds", lines, used);
	free(lines);
}

/* Adds what getters tell about the process. */
static void process(void)
{
	char text[256];
	int deathsig = -1;

	prctl(PR_GET_PDEATHSIG, &deathsig);
	snprintf(text, sizeof text, "pid %d\nppid %d\npgid %d\nsid %d\npdeathsig %d\n", (int)getpid(),
		(int)getppid(), (int)getpgrp(), (int)getsid(0), deathsig);
	part("process", text, strlen(text));
}

int main(void)
{
	const char *name = getenv("RECORDER_OUT");
	size_t done = 0;
	int fd;

	/* Collected in memory first, so that the record does not show itself. */
	out = open_memstream(&record, &record_length);
	descriptors();
	file("cmdline");
	file("environ");
	file("status");
	file("limits");
	link_target("cwd");
	link_target("exe");
	process();
	fclose(out);
	if (name == NULL) {
		static char beside[4096];
		ssize_t length = readlink("/proc/self/exe", beside, sizeof beside - sizeof ".record");

		if (length < 0)
			return 99;
		memcpy(beside + length, ".record", sizeof ".record");
		name = beside;
	}
	fd = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		return 98;
	fchmod(fd, 0600);
	while (done < record_length) {
		ssize_t count = write(fd, record + done, record_length - done);

		if (count <= 0)
			return 97;
		done += (size_t)count;
	}
	return 0;
}
