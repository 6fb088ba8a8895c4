/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether a config.json may ask for something: whether one of some words is among its bytes.
 *
 * It is not parsed.  gpuruntime/request/parse.py has the words, and the same rule.
 */

#ifndef GPURUNTIME_TRIGGERS_H
#define GPURUNTIME_TRIGGERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "files.h"
#include "kernel.h"
#include "text.h"

/* MOST_WORDS and LONGEST_WORD are those of gpuruntime/launcher/companion.py. */
enum { MOST_WORDS = 128, LONGEST_WORD = 256, CHUNK = 1 << 16, BEHIND = 8, LARGEST_CONFIG = 4 << 20 };

/* The words, and by pairs of bytes what may begin there: most bytes of a config.json begin nothing,
 * and cost one look at this table. */
struct triggers {
	size_t count;
	const char *words[MOST_WORDS + 1];
	uint8_t others[MOST_WORDS + 1];
	uint8_t first[1 << 16];
};

/* In the table, beside the numbers of words: an escape. */
enum { ESCAPE = MOST_WORDS + 1 };

static size_t pair(const char *bytes)
{
	return (size_t)(uint8_t)bytes[0] | (size_t)(uint8_t)bytes[1] << 8;
}

/* Reads *words*, each ended by a NUL and the last by two; false if that are too many, or one cannot
 * be looked for.  Those that begin with the same pair are a chain, which ends in 0. */
static bool learn(struct triggers *triggers, const char *words)
{
	triggers->first[pair("\\u")] = ESCAPE;
	triggers->first[pair("\\/")] = ESCAPE;
	for (; *words != '\0'; words += until(words, '\0') + 1) {
		const size_t length = until(words, '\0');
		uint8_t *first = &triggers->first[pair(words)];

		if (triggers->count == MOST_WORDS || length < 2 || length > LONGEST_WORD || *first == ESCAPE)
			return false;
		triggers->count++;
		triggers->words[triggers->count] = words;
		triggers->others[triggers->count] = *first;
		*first = (uint8_t)triggers->count;
	}
	return true;
}

/* The value of a hexadecimal digit, 16 for another byte. */
static unsigned digit(char byte)
{
	if (byte >= '0' && byte <= '9')
		return (unsigned)(byte - '0');
	byte |= 0x20;
	return byte >= 'a' && byte <= 'f' ? (unsigned)(byte - 'a') + 10 : 16;
}

/* True if the escape at *bytes*, which begins with a backslash, can be part of a word: a slash, or
 * one of A-Z a-z 0-9 _ - . / = : by its number.  What Go escapes by habit is none of these. */
static bool hides(const char *bytes)
{
	unsigned high, low, byte;

	if (bytes[1] != 'u')
		return true;
	if (bytes[2] != '0' || bytes[3] != '0')
		return false;
	high = digit(bytes[4]);
	low = digit(bytes[5]);
	if (high > 7 || low > 15)
		return false;
	byte = high << 4 | low;
	return (byte >= '-' && byte <= ':') || byte == '=' || byte == '_'
		|| ((byte | 0x20) >= 'a' && (byte | 0x20) <= 'z');
}

/* True if the NUL-terminated *word* is at *at*. */
static bool is_at(const char *at, const char *word)
{
	while (*word != '\0' && *word == *at) {
		word++;
		at++;
	}
	return *word == '\0';
}

/* True if a word begins at *at*, or an escape that may hide one. */
static bool begins(const struct triggers *triggers, const char *at)
{
	uint8_t number = triggers->first[pair(at)];

	if (number == ESCAPE)
		return hides(at);
	for (; number != 0; number = triggers->others[number]) {
		if (is_at(at, triggers->words[number]))
			return true;
	}
	return false;
}

/* True if that is so somewhere in the *length* bytes at *bytes*; writes BEHIND more. */
static bool found_in(const struct triggers *triggers, char *bytes, size_t length)
{
	/* Ends the search, and goes on with no word. */
	static const char last[BEHIND] = "\\u";
	const uint8_t *first = triggers->first;
	size_t at = 0;

	for (size_t i = 0; i < BEHIND; i++)
		bytes[length + i] = last[i];
	do {
		uint8_t either;

		/* This loop is nearly all that a launcher does. */
		do {
			either = first[pair(bytes + at)] | first[pair(bytes + at + 1)];
			at += 2;
		} while (either == 0);
		if (begins(triggers, bytes + at - 2) || begins(triggers, bytes + at - 1))
			return true;
	} while (at < length);
	return false;
}

/* Whether the file in path may ask for something with one of *words* in it: 1 yes, 0 no, -1 if it
 * is no ordinary file of a usual size.  It is read piece by piece, each beginning with the end of
 * the one before. */
static int may_ask(const char *words)
{
	static struct triggers triggers;
	static struct statx info;
	static char bytes[LONGEST_WORD + CHUNK + BEHIND];
	size_t total = 0, kept = 0;
	int result = -1;
	long fd;

	if (!learn(&triggers, words))
		return -1;
	fd = call(SYS_openat, AT_FDCWD, (long)path.bytes, O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0, 0);
	if (fd < 0)
		return -1;
	if (look_at((int)fd, "", AT_EMPTY_PATH, &info) == 0 && (info.mode & S_IFMT) == S_IFREG) {
		while (result < 0) {
			const long count = read_all(fd, bytes + kept, CHUNK);
			size_t length;

			if (count < 0)
				break;
			total += (size_t)count;
			if (total > LARGEST_CONFIG)
				break;
			length = kept + (size_t)count;
			if (found_in(&triggers, bytes, length))
				result = 1;
			else if (count < CHUNK)
				result = 0;
			kept = length < LONGEST_WORD ? length : LONGEST_WORD;
			for (size_t i = 0; i < kept; i++)
				bytes[i] = bytes[length - kept + i];
		}
	}
	call(SYS_close, fd, 0, 0, 0, 0);
	return result;
}

#endif
