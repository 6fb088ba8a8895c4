/* SPDX-License-Identifier: Apache-2.0
 *
 * Text in fixed buffers, and the few string functions that a program without a C library lacks.
 */

#ifndef GPURUNTIME_TEXT_H
#define GPURUNTIME_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernel.h"

/* Twice as long as any path that the kernel takes: a path that was cut here is refused there. */
struct text {
	size_t length;
	char bytes[8192];
};

/* True if the two strings are the same. */
static bool equal(const char *a, const char *b)
{
	while (*a != '\0' && *a == *b) {
		a++;
		b++;
	}
	return *a == *b;
}

/* Bytes of *text* before the first *end*, or before its end. */
static size_t until(const char *text, char end)
{
	size_t length = 0;

	while (text[length] != '\0' && text[length] != end)
		length++;
	return length;
}

/* True if *text* starts with the *length* bytes at *start*. */
static bool starts_with(const char *text, const char *start, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		if (text[i] != start[i])
			return false;
	}
	return true;
}

/* Some bytes that belong to somebody else. */
struct slice {
	const char *bytes;
	size_t length;
};

static bool same(struct slice a, struct slice b)
{
	return a.length == b.length && starts_with(a.bytes, b.bytes, b.length);
}

static struct slice text_slice(const char *text)
{
	return (struct slice){text, until(text, '\0')};
}

/* Makes *out* the empty string. */
static void clear(struct text *out)
{
	out->length = 0;
	out->bytes[0] = '\0';
}

/* Appends *length* bytes; what does not fit is dropped. */
static void append_bytes(struct text *out, const char *bytes, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		if (out->length + 1 >= sizeof out->bytes)
			break;
		out->bytes[out->length] = bytes[i];
		out->length++;
	}
	out->bytes[out->length] = '\0';
}

/* Appends a string. */
static void append(struct text *out, const char *string)
{
	append_bytes(out, string, until(string, '\0'));
}

/* Appends a number in decimal. */
static void append_number(struct text *out, uint64_t number)
{
	char digits[20];
	size_t first = sizeof digits;

	do {
		first--;
		digits[first] = (char)('0' + number % 10);
		number /= 10;
	} while (number != 0);
	append_bytes(out, digits + first, sizeof digits - first);
}

/* Appends a string; bytes that could upset a terminal or forge a log line become '?'. */
static void append_plain(struct text *out, const char *string)
{
	for (; *string != '\0'; string++) {
		bool plain = *string >= ' ' && *string < 0x7f && *string != '"';

		append_bytes(out, plain ? string : "?", 1);
	}
}

/* Appends a string in double quotes. */
static void append_quoted(struct text *out, const char *string)
{
	append(out, "\"");
	append_plain(out, string);
	append(out, "\"");
}

/* Writes *out* to *fd*; a reader that went away is not our failure. */
static void write_out(int fd, const struct text *out)
{
	size_t done = 0;

	while (done < out->length) {
		long count = call(SYS_write, fd, (long)(out->bytes + done), (long)(out->length - done), 0, 0);

		if (count <= 0)
			break;
		done += (size_t)count;
	}
}

#endif
