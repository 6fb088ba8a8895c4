/* SPDX-License-Identifier: Apache-2.0
 *
 * Files that decide what runs: whose they may be, and how they are read.
 */

#ifndef GPURUNTIME_FILES_H
#define GPURUNTIME_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernel.h"
#include "report.h"
#include "text.h"

enum { OVERFLOW_UID = 65534 };

/* The path that is being looked at. */
static struct text path;

/* Joins *directory* and *name* in path. */
static void join(const char *directory, size_t length, const char *name)
{
	clear(&path);
	append_bytes(&path, directory, length);
	if (length != 0 && directory[length - 1] != '/')
		append(&path, "/");
	append(&path, name);
}

/* Reads what is left of *fd* into *buffer*; the number of bytes, *size* if there may be more. */
static long read_all(long fd, char *buffer, size_t size)
{
	size_t length = 0;

	while (length < size) {
		long count = call(SYS_read, fd, (long)(buffer + length), (long)(size - length), 0, 0);

		if (count < 0)
			return count;
		if (count == 0)
			break;
		length += (size_t)count;
	}
	return (long)length;
}

/* True if root of the host has no number here; then its files show the overflow uid. */
static bool lacks_host_root(void)
{
	static char map[4096];
	const long fd = call(SYS_openat, AT_FDCWD, (long)"/proc/self/uid_map", O_CLOEXEC, 0, 0);
	const char *at = map;
	long length;

	if (fd < 0)
		return false;
	length = read_all(fd, map, sizeof map);
	call(SYS_close, fd, 0, 0, 0, 0);
	if (length < 0 || length == (long)sizeof map)
		return false;
	/* A line has the first number here, that outside, and how many. */
	while (*at != '\0') {
		for (int number = 0; number < 2; number++) {
			if (number == 1)
				at += until(at, ' ');
			while (*at == ' ')
				at++;
		}
		if (at[0] == '0' && at[1] == ' ')
			return false;
		at += until(at, '\n');
		if (*at == '\n')
			at++;
	}
	return true;
}

/* True if nobody but root and ourselves can have written what *info* describes; gpuruntime/trusted_files.py
 * is the same rule. */
static bool trusted(const struct statx *info)
{
	if ((info->mode & 022) != 0)
		return false;
	if (info->uid == 0 || (long)info->uid == call(SYS_geteuid, 0, 0, 0, 0, 0))
		return true;
	return info->uid == OVERFLOW_UID && lacks_host_root();
}

/* Reads the text file in path, at most *size* - 1 bytes, into *buffer*, a NUL behind it; its length
 * or the negative reason why it is not to be believed. */
static long read_trusted(char *buffer, size_t size)
{
	static struct statx info;
	const long fd = call(SYS_openat, AT_FDCWD, (long)path.bytes, O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0, 0);
	size_t name = path.length;
	char first;
	long result;

	if (fd < 0)
		return fd;
	result = look_at((int)fd, "", AT_EMPTY_PATH, &info);
	if (result == 0 && (info.mode & S_IFMT) != S_IFREG)
		result = -NO_FILE;
	if (result == 0 && !trusted(&info))
		result = -UNTRUSTED;
	if (result == 0)
		result = read_all(fd, buffer, size);
	call(SYS_close, fd, 0, 0, 0, 0);
	if (result < 0)
		return result;
	if ((size_t)result == size)
		return -TOO_LARGE;
	buffer[result] = '\0';
	if (until(buffer, '\0') != (size_t)result)
		return -MALFORMED;
	while (name > 1 && path.bytes[name - 1] != '/')
		name--;
	first = path.bytes[name];
	path.bytes[name] = '\0';
	if (look_at(AT_FDCWD, path.bytes, 0, &info) != 0 || !trusted(&info))
		result = -UNTRUSTED;
	path.bytes[name] = first;
	return result;
}

/* A device number as Python's st_dev shows it, which is the C library's makedev. */
static uint64_t device_number(uint32_t major, uint32_t minor)
{
	uint64_t number = (uint64_t)(major & 0xfffU) << 8;

	number |= (uint64_t)(major & ~0xfffU) << 32;
	number |= minor & 0xffU;
	number |= (uint64_t)(minor & ~0xffU) << 12;
	return number;
}

/* Appends the number of the device that holds a file. */
static void append_device(struct text *out, const struct statx *info)
{
	append_number(out, device_number(info->dev_major, info->dev_minor));
}

/* Appends a blank and a time in nanoseconds. */
static void append_time(struct text *out, const struct timestamp *time)
{
	append(out, " ");
	/* Before 1970 this wraps to what Python never writes: no match, so Python. */
	append_number(out, (uint64_t)time->seconds * 1000000000U + time->nanoseconds);
}

/* Appends what changes with a file: device, inode, size and times.  Whoever restores mtime, as tar and
 * cp -p do, cannot restore ctime. */
static void append_identity(struct text *out, const struct statx *info)
{
	append_device(out, info);
	append(out, " ");
	append_number(out, info->ino);
	append(out, " ");
	append_number(out, info->size);
	append_time(out, &info->mtime);
	append_time(out, &info->ctime);
}

#endif
