/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host answers to a few questions, each answer as a text.
 *
 * gpuruntime/probes.py asks the same ones, gpuruntime/launcher/replay.py writes its answers as they are
 * written here; tests run one table of cases through both.  Other errors than "not there" are
 * answered alike: "-".
 */

#ifndef GPURUNTIME_FINGERPRINT_H
#define GPURUNTIME_FINGERPRINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "environment.h"
#include "files.h"
#include "kernel.h"
#include "text.h"

/* MOST_CONTENT and PRIME are those of gpuruntime/probes.py. */
enum { MOST_CONTENT = 1 << 20, PRIME = 1073741789, ENTRIES = 1 << 15 };

static struct text answer;

/* What getdents64(2) fills in. */
struct entry {
	uint64_t ino;
	int64_t offset;
	uint16_t length;
	uint8_t kind;
	char name[];
};

/* Device and inode of what is in path; of a file itself, *whole*, size and times as well. */
static void ask_identity(bool whole)
{
	static struct statx info;

	if (look_at(AT_FDCWD, path.bytes, 0, &info) != 0) {
		append(&answer, "-");
		return;
	}
	if (whole) {
		append_identity(&answer, &info);
		return;
	}
	append_device(&answer, &info);
	append(&answer, " ");
	append_number(&answer, info.ino);
}

static void ask_exists(void)
{
	static struct statx info;
	const bool found = look_at(AT_FDCWD, path.bytes, AT_SYMLINK_NOFOLLOW, &info) == 0;

	append(&answer, found ? "1" : "0");
}

static void ask_link(void)
{
	static char target[4096];
	const long length = call(SYS_readlinkat, AT_FDCWD, (long)path.bytes, (long)target, sizeof target, 0);

	append(&answer, length < 0 ? "-" : "=");
	if (length > 0)
		append_bytes(&answer, target, (size_t)length);
}

static void ask_variable(char **envp)
{
	const size_t length = until(path.bytes, '\0');

	for (; *envp != NULL; envp++) {
		if (starts_with(*envp, path.bytes, length) && (*envp)[length] == '=') {
			append(&answer, *envp + length);
			return;
		}
	}
	append(&answer, "-");
}

/* The remainder of a number by PRIME, to whose bytes those at *bytes* are added. */
static uint64_t remainder_of(uint64_t before, const uint8_t *bytes, size_t length)
{
	for (size_t i = 0; i < length; i++)
		before = (before << 8 | bytes[i]) % PRIME;
	return before;
}

/* Length of the file in path, and the remainder of its bytes as one number. */
static void ask_content(void)
{
	static uint8_t bytes[1 << 16];
	const long fd = call(SYS_openat, AT_FDCWD, (long)path.bytes, O_CLOEXEC | O_NONBLOCK, 0, 0);
	uint64_t length = 0, remainder = 0;
	long count = 1;

	while (fd >= 0 && count > 0 && length < MOST_CONTENT) {
		count = call(SYS_read, fd, (long)bytes, sizeof bytes, 0, 0);
		if (count > 0) {
			remainder = remainder_of(remainder, bytes, (size_t)count);
			length += (uint64_t)count;
		}
	}
	if (fd >= 0)
		call(SYS_close, fd, 0, 0, 0, 0);
	if (fd < 0 || count < 0) {
		append(&answer, "-");
		return;
	}
	append_number(&answer, length);
	append(&answer, " ");
	append_number(&answer, remainder);
}

/* True if *part* is somewhere in *whole*. */
static bool has(struct slice whole, struct slice part)
{
	for (size_t at = 0; at + part.length <= whole.length; at++) {
		if (whole.bytes[at] == part.bytes[0] && starts_with(whole.bytes + at, part.bytes, part.length))
			return true;
	}
	return false;
}

/* Appends *name* and, if *directory* is not NULL, what the node of that name there is. */
static bool append_entry(const char *directory, const char *name)
{
	static struct statx info;

	append(&answer, "/");
	append(&answer, name);
	if (directory != NULL) {
		join(directory, until(directory, '\0'), name);
		if (look_at(AT_FDCWD, path.bytes, AT_SYMLINK_NOFOLLOW, &info) != 0)
			return false;
		append(&answer, " ");
		append_number(&answer, info.mode);
		append(&answer, " ");
		append_number(&answer, info.uid);
		append(&answer, " ");
		append_number(&answer, info.gid);
		append(&answer, " ");
		append_number(&answer, device_number(info.rdev_major, info.rdev_minor));
	}
	append(&answer, "/");
	return true;
}

/* Counts the entries of the directory *fd* whose names begin with *start*, if all are in *expected*
 * as append_entry() writes them; -1 if one is not, or if it cannot be read. */
static long count_entries(long fd, const char *directory, const char *start, struct slice expected)
{
	static _Alignas(8) char entries[ENTRIES];
	const size_t width = until(start, '\0');
	long found = 0;

	for (;;) {
		const long count = call(SYS_getdents64, fd, (long)entries, sizeof entries, 0, 0);

		if (count <= 0)
			return count < 0 ? -1 : found;
		for (long at = 0; at < count;) {
			const struct entry *entry = (const struct entry *)(const void *)(entries + at);

			at += entry->length;
			if (equal(entry->name, ".") || equal(entry->name, "..") || !starts_with(entry->name, start, width))
				continue;
			clear(&answer);
			/* What went away meanwhile is not there. */
			if (!append_entry(directory, entry->name))
				continue;
			if (!has(expected, (struct slice){answer.bytes, answer.length}))
				return -1;
			found++;
		}
	}
}

/* True if the directory *directory* has the entries *expected*: their number, and each between two
 * slashes.  Of nodes, those that begin with *start* count, and what they are. */
static bool lists_entries(const char *directory, const char *start, bool nodes, struct slice expected)
{
	const long fd = call(SYS_openat, AT_FDCWD, (long)directory, O_DIRECTORY | O_CLOEXEC, 0, 0);
	long found;

	if (fd < 0) {
		clear(&answer);
		append(&answer, nodes ? "0/" : "-");
		return same(expected, (struct slice){answer.bytes, answer.length});
	}
	found = count_entries(fd, nodes ? directory : NULL, start, expected);
	call(SYS_close, fd, 0, 0, 0, 0);
	if (found < 0)
		return false;
	clear(&answer);
	append_number(&answer, (uint64_t)found);
	append(&answer, "/");
	return expected.length >= answer.length && starts_with(expected.bytes, answer.bytes, answer.length);
}

/* True if the nodes at path, which may end in a star, are *expected*. */
static bool has_nodes(struct slice expected)
{
	static struct text directory;
	static struct text name;
	size_t slash = path.length;
	bool all;

	while (slash > 0 && path.bytes[slash - 1] != '/')
		slash--;
	clear(&directory);
	append_bytes(&directory, path.bytes, slash);
	clear(&name);
	append(&name, path.bytes + slash);
	all = name.length != 0 && name.bytes[name.length - 1] == '*';
	if (all) {
		name.bytes[name.length - 1] = '\0';
		return lists_entries(directory.bytes, name.bytes, true, expected);
	}
	clear(&answer);
	append(&answer, "1/");
	if (!append_entry(directory.bytes, name.bytes)) {
		clear(&answer);
		append(&answer, "0/");
	}
	return same(expected, (struct slice){answer.bytes, answer.length});
}

/* True if the host still answers *expected* to *operation* on *argument*. */
static bool holds(struct slice operation, struct slice argument, struct slice expected, char **envp)
{
	static struct text name;

	clear(&path);
	append_bytes(&path, argument.bytes, argument.length);
	clear(&name);
	append_bytes(&name, operation.bytes, operation.length);
	clear(&answer);
	if (equal(name.bytes, "names"))
		return lists_entries(path.bytes, "", false, expected);
	if (equal(name.bytes, "nodes"))
		return has_nodes(expected);
	if (equal(name.bytes, "place") || equal(name.bytes, "identity"))
		ask_identity(equal(name.bytes, "identity"));
	else if (equal(name.bytes, "exists"))
		ask_exists();
	else if (equal(name.bytes, "link"))
		ask_link();
	else if (equal(name.bytes, "content"))
		ask_content();
	else if (equal(name.bytes, "variable"))
		ask_variable(envp);
	else
		return false;
	return same(expected, (struct slice){answer.bytes, answer.length});
}

#endif
