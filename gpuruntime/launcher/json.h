/* SPDX-License-Identifier: Apache-2.0
 *
 * A strict reader of JSON, and where the parts of a document are.
 *
 * What it takes is brought to the one form in which gpuruntime/oci/bundle.py writes documents: no
 * blanks, no escape that is not needed.  So two values are the same if their bytes are.  What it
 * does not take may be good JSON: numbers with a fraction, say.  Then Python decides.
 */

#ifndef GPURUNTIME_JSON_H
#define GPURUNTIME_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"
#include "triggers.h"

enum { MOST_NODES = 1 << 16, MOST_MEMBERS = 512, DEEPEST = 32, MOST_DIGITS = 64 };

/* Some bytes that belong to somebody else. */
struct slice {
	const char *bytes;
	size_t length;
};

/* A value, or the name of a member: *kind* is its first byte, of a name KEY.  Its parts follow it up
 * to *after*, those of an object by turns a name and a value.  It is bytes *start* to *end*. */
struct node {
	uint32_t start, end, after;
	char kind;
};

enum { KEY = 'k' };

/* The first node is the document.  *in* is what is read next, *out* where it is put. */
struct json {
	char *bytes;
	size_t in, out;
	uint32_t count;
	struct node nodes[MOST_NODES];
};

static bool same(struct slice a, struct slice b)
{
	return a.length == b.length && starts_with(a.bytes, b.bytes, b.length);
}

static struct slice slice_of(const struct json *json, uint32_t node)
{
	const struct node *found = &json->nodes[node];

	return (struct slice){json->bytes + found->start, found->end - found->start};
}

static void put(struct json *json, uint32_t byte)
{
	json->bytes[json->out] = (char)byte;
	json->out++;
}

/* Moves on to what is no blank, and returns it. */
static char peek(struct json *json)
{
	char byte = json->bytes[json->in];

	while (byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r') {
		json->in++;
		byte = json->bytes[json->in];
	}
	return byte;
}

/* Reads the next byte, if it is *byte*. */
static bool take(struct json *json, char byte)
{
	if (peek(json) != byte)
		return false;
	json->in++;
	put(json, (uint8_t)byte);
	return true;
}

/* Puts the character with the number *code*, which is no more than 0xffff. */
static void put_character(struct json *json, uint32_t code)
{
	if (code < 0x80) {
		put(json, code);
	} else if (code < 0x800) {
		put(json, 0xc0 | code >> 6);
		put(json, 0x80 | (code & 0x3f));
	} else {
		put(json, 0xe0 | code >> 12);
		put(json, 0x80 | (code >> 6 & 0x3f));
		put(json, 0x80 | (code & 0x3f));
	}
}

/* Reads what is behind a backslash. */
static bool read_escape(struct json *json)
{
	static const char kept[] = "\"\\bfnrt";
	const char *at = json->bytes + json->in;
	uint32_t code = 0;

	if (*at != 'u') {
		if (kept[until(kept, *at)] == '\0')
			return false;
		put(json, '\\');
		put(json, (uint8_t)*at);
		json->in++;
		return true;
	}
	for (int i = 1; i <= 4; i++) {
		const unsigned value = digit(at[i]);

		if (value > 15)
			return false;
		code = code << 4 | value;
	}
	/* What would have to be written as an escape again, and halves of a character. */
	if (code < ' ' || code == '"' || code == '\\' || (code >= 0xd800 && code < 0xe000))
		return false;
	json->in += 5;
	put_character(json, code);
	return true;
}

/* Reads a character of more than one byte, which is UTF-8 as the standard has it. */
static bool read_character(struct json *json)
{
	const uint8_t *at = (const uint8_t *)json->bytes + json->in;
	const uint8_t lead = at[0];
	uint8_t least = 0x80, most = 0xbf;
	int more;

	if (lead >= 0xc2 && lead <= 0xdf)
		more = 1;
	else if (lead >= 0xe0 && lead <= 0xef)
		more = 2;
	else if (lead >= 0xf0 && lead <= 0xf4)
		more = 3;
	else
		return false;
	/* Not longer than need be, no halves of a character, nothing above the last one. */
	if (lead == 0xe0)
		least = 0xa0;
	if (lead == 0xf0)
		least = 0x90;
	if (lead == 0xed)
		most = 0x9f;
	if (lead == 0xf4)
		most = 0x8f;
	put(json, lead);
	for (int i = 1; i <= more; i++) {
		if (at[i] < least || at[i] > most)
			return false;
		put(json, at[i]);
		least = 0x80;
		most = 0xbf;
	}
	json->in += 1 + (size_t)more;
	return true;
}

/* Reads a string, whose first quotation mark is the next byte. */
static bool read_string(struct json *json)
{
	if (!take(json, '"'))
		return false;
	for (;;) {
		const uint8_t byte = (uint8_t)json->bytes[json->in];

		if (byte >= 0x80) {
			if (!read_character(json))
				return false;
			continue;
		}
		if (byte < ' ')
			return false;
		json->in++;
		if (byte == '\\') {
			if (!read_escape(json))
				return false;
			continue;
		}
		put(json, byte);
		if (byte == '"')
			return true;
	}
}

/* Reads a whole number, as Python writes it. */
static bool read_number(struct json *json)
{
	const char *at = json->bytes + json->in;
	const size_t sign = at[0] == '-';
	size_t length = sign;

	while (at[length] >= '0' && at[length] <= '9')
		length++;
	if (length == sign || length > MOST_DIGITS || (at[sign] == '0' && length != 1))
		return false;
	for (size_t i = 0; i < length; i++)
		put(json, (uint8_t)at[i]);
	json->in += length;
	return true;
}

/* Reads one of the three words. */
static bool read_word(struct json *json)
{
	static const char *const words[] = {"true", "false", "null"};

	for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
		const size_t length = until(words[i], '\0');

		if (starts_with(json->bytes + json->in, words[i], length)) {
			for (size_t at = 0; at < length; at++)
				put(json, (uint8_t)words[i][at]);
			json->in += length;
			return true;
		}
	}
	return false;
}

/* Begins a node of *kind* at the next byte; its number, 0 if there is no room. */
static uint32_t begin_node(struct json *json, char kind)
{
	const uint32_t number = json->count;

	if (number == MOST_NODES)
		return 0;
	json->nodes[number].kind = kind;
	json->nodes[number].start = (uint32_t)json->out;
	json->count++;
	return number;
}

static void end_node(struct json *json, uint32_t number)
{
	json->nodes[number].end = (uint32_t)json->out;
	json->nodes[number].after = json->count;
}

/* Reads the name of a member of *object*, and what is behind it; false if it is there twice. */
static bool read_name(struct json *json, uint32_t object)
{
	const uint32_t name = begin_node(json, KEY);
	uint32_t members = 0;

	if (name == 0 || peek(json) != '"' || !read_string(json))
		return false;
	end_node(json, name);
	for (uint32_t other = object + 1; other != name; other = json->nodes[other + 1].after) {
		members++;
		if (members == MOST_MEMBERS || same(slice_of(json, other), slice_of(json, name)))
			return false;
	}
	return take(json, ':');
}

static bool read_value(struct json *json, unsigned depth);

/* Reads the parts of *node*, an object or an array, up to *end*. */
static bool read_parts(struct json *json, uint32_t node, char end, unsigned depth)
{
	if (depth == DEEPEST)
		return false;
	json->in++;
	put(json, (uint8_t)json->nodes[node].kind);
	if (take(json, end))
		return true;
	do {
		if (json->nodes[node].kind == '{' && !read_name(json, node))
			return false;
		if (!read_value(json, depth + 1))
			return false;
	} while (take(json, ','));
	return take(json, end);
}

/* Reads a value, which lies inside of *depth* others. */
static bool read_value(struct json *json, unsigned depth)
{
	const char first = peek(json);
	const uint32_t node = begin_node(json, first);
	bool good;

	if (node == 0 && depth != 0)
		return false;
	if (first == '{')
		good = read_parts(json, node, '}', depth);
	else if (first == '[')
		good = read_parts(json, node, ']', depth);
	else if (first == '"')
		good = read_string(json);
	else if (first == '-' || (first >= '0' && first <= '9'))
		good = read_number(json);
	else
		good = read_word(json);
	end_node(json, node);
	return good;
}

/* Reads the document of *length* bytes in json->bytes, a NUL behind them; true if it is an object. */
static bool read_document(struct json *json, size_t length)
{
	json->in = json->out = 0;
	json->count = 0;
	return peek(json) == '{' && read_value(json, 0) && peek(json) == '\0' && json->in == length;
}

/* The value of the member *name*, in quotation marks, of *object*; 0, which is no member, if it has
 * none or is no object. */
static uint32_t member(const struct json *json, uint32_t object, const char *name)
{
	const struct slice wanted = {name, until(name, '\0')};
	const uint32_t end = json->nodes[object].after;

	if (json->nodes[object].kind != '{')
		return 0;
	for (uint32_t at = object + 1; at != end; at = json->nodes[at + 1].after) {
		if (same(slice_of(json, at), wanted))
			return at + 1;
	}
	return 0;
}

#endif
