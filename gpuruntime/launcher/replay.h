/* SPDX-License-Identifier: Apache-2.0
 *
 * A create that Python has prepared before, prepared again without it.
 *
 * Nothing of a config.json is understood here, not even its JSON.  gpuruntime/launcher/replay.py writes
 * a file for each result: the bytes of a config.json, in which the contents of some strings are holes,
 * what the host was, and the bytes that came out, with the same holes.  If all bytes of a config.json
 * but those in the holes are the same, and the host is, then what was in its holes is put into the
 * others.  So the result is what Python would write.  In any doubt nothing is touched, and Python
 * decides.  README.md has the format of the file.
 */

#ifndef GPURUNTIME_REPLAY_H
#define GPURUNTIME_REPLAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "files.h"
#include "fingerprint.h"
#include "kernel.h"
#include "text.h"
#include "triggers.h"

/* Only tests set it. */
#ifndef REPLAY
#define REPLAY "/run/gpuruntime/replay"
#endif

enum { LARGEST_REPLAY = 1 << 18, LARGEST_REPLAYED = 1 << 18, LARGEST_RESULT = 1 << 19, MOST_HOLES = 1 << 11 };

struct replay {
	long directory;
	struct statx before;
	size_t length, holes, result_length;
	struct slice hole[MOST_HOLES];
	char document[LARGEST_REPLAYED];
	char file[LARGEST_REPLAY];
	char result[LARGEST_RESULT];
};

/* ---- the file: fields, each a number of bytes, a colon, the bytes and a line feed ---- */

/* The fields from *at* to *end*; *bad* after something that is none. */
struct fields {
	const char *at, *end;
	bool bad;
};

static struct fields fields_of(struct slice slice)
{
	return (struct fields){slice.bytes, slice.bytes + slice.length, false};
}

/* True if there is another field. */
static bool more(const struct fields *fields)
{
	return !fields->bad && fields->at != fields->end;
}

/* The next field; an empty one if there is none. */
static struct slice next(struct fields *fields)
{
	const char *at = fields->at;
	size_t length = 0;

	while (at != fields->end && *at >= '0' && *at <= '9' && length < LARGEST_REPLAY) {
		length = length * 10 + (size_t)(*at - '0');
		at++;
	}
	/* Room for the colon, the bytes and the line feed. */
	if (at == fields->at || (size_t)(fields->end - at) < length + 2 || at[0] != ':' || at[length + 1] != '\n') {
		fields->bad = true;
		return (struct slice){"", 0};
	}
	fields->at = at + length + 2;
	return (struct slice){at + 1, length};
}

/* ---- the document ---- */

/* Opens the bundle and reads its config.json; false if it is no ordinary file, or a large one. */
static bool read_bundle(struct replay *replay, const char *bundle)
{
	long fd, length = -1;

	replay->directory = call(SYS_openat, AT_FDCWD, (long)bundle, O_PATH | O_DIRECTORY | O_CLOEXEC, 0, 0);
	if (replay->directory < 0)
		return false;
	fd = call(SYS_openat, replay->directory, (long)"config.json", O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0, 0);
	if (fd < 0)
		return false;
	if (look_at((int)fd, "", AT_EMPTY_PATH, &replay->before) == 0 && (replay->before.mode & S_IFMT) == S_IFREG)
		length = read_all(fd, replay->document, sizeof replay->document);
	call(SYS_close, fd, 0, 0, 0, 0);
	if (length < 0 || length == (long)sizeof replay->document)
		return false;
	replay->document[length] = '\0';
	replay->length = (size_t)length;
	return true;
}

/* True if one of *words*, each ended by a NUL and the last by two, is in *text*. */
static bool has_word(struct slice text, const char *words)
{
	for (; *words != '\0'; words += until(words, '\0') + 1) {
		if (has(text, text_slice(words)))
			return true;
	}
	return false;
}

/* A number of the document that is the same whatever is in holes: of its bytes outside of strings, and of
 * the strings that have one of *words*. */
static uint64_t number_of(const struct replay *replay, const char *words)
{
	const char *const bytes = replay->document;
	uint64_t number = 0;

	for (size_t at = 0; at < replay->length; at++) {
		const size_t start = at + 1;

		if (bytes[at] != '"') {
			number = remainder_of(number, (const uint8_t *)bytes + at, 1);
			continue;
		}
		for (at++; at < replay->length && bytes[at] != '"'; at++)
			at += bytes[at] == '\\';
		if (at < replay->length && has_word((struct slice){bytes + start, at - start}, words))
			number = remainder_of(number, (const uint8_t *)bytes + start, at - start);
	}
	return number;
}

/* ---- what came in ---- */

/* The bytes of the character at *at*, which may be in a hole: ASCII, or one of the escapes that do not
 * hide a word; 0 for any other. */
static size_t width_of(const char *at, bool without_colon)
{
	static const char *const escapes[] = {
		"\\\"", "\\\\", "\\b", "\\f", "\\n", "\\r", "\\t", "\\u003c", "\\u003e", "\\u0026",
	};

	if (*at != '\\')
		return *at >= ' ' && *at <= '~' && !(without_colon && *at == ':');
	for (size_t i = 0; i < sizeof escapes / sizeof *escapes; i++) {
		const size_t width = until(escapes[i], '\0');

		if (starts_with(at, escapes[i], width))
			return width;
	}
	return 0;
}

/* Leaves at *end the end of the string of *document in which *at is; false if it may not be in a hole. */
static bool read_hole(const char *document, const char *at, bool without_colon, const char *words, const char **end)
{
	const char *start = at;

	while (*at != '"') {
		const size_t width = width_of(at, without_colon);

		if (width == 0)
			return false;
		at += width;
	}
	*end = at;
	/* Of a variable, the name is in front of the hole. */
	while (start > document && start[-1] != '"')
		start--;
	return !has_word((struct slice){start, (size_t)(at - start)}, words);
}

/* True if the document is the *template*: by turns bytes and the kind of a hole.  Leaves the holes. */
static bool matches(struct replay *replay, struct fields template, const char *words)
{
	const char *at = replay->document;
	const char *const end = at + replay->length;

	for (replay->holes = 0; replay->holes < MOST_HOLES; replay->holes++) {
		const struct slice bytes = next(&template);
		const char *start;
		struct slice kind;

		if (template.bad || bytes.length == 0 || (size_t)(end - at) < bytes.length
			|| !starts_with(at, bytes.bytes, bytes.length))
			return false;
		at += bytes.length;
		if (!more(&template))
			return at == end;
		kind = next(&template);
		start = at;
		if (kind.length != 1 || !read_hole(replay->document, start, kind.bytes[0] == 'c', words, &at))
			return false;
		replay->hole[replay->holes] = (struct slice){start, (size_t)(at - start)};
	}
	return false;
}

/* True if the host answers as *probes* say: operation, argument and answer of each. */
static bool fits_host(struct fields probes, char **envp)
{
	while (more(&probes)) {
		const struct slice operation = next(&probes);
		const struct slice argument = next(&probes);
		const struct slice expected = next(&probes);

		if (probes.bad || !holds(operation, argument, expected, envp))
			return false;
	}
	return !probes.bad;
}

/* ---- what comes out ---- */

/* Appends *bytes* to the result; of a hole, with what Go escapes by habit as Python writes it. */
static bool put(struct replay *replay, struct slice bytes, bool is_hole)
{
	if (bytes.length > LARGEST_RESULT - replay->result_length)
		return false;
	for (size_t i = 0; i < bytes.length; i++) {
		char byte = bytes.bytes[i];

		if (is_hole && byte == '\\' && bytes.bytes[i + 1] == 'u') {
			byte = (char)(digit(bytes.bytes[i + 4]) << 4 | digit(bytes.bytes[i + 5]));
			i += 5;
		} else if (is_hole && byte == '\\') {
			replay->result[replay->result_length++] = byte;
			byte = bytes.bytes[++i];
		}
		replay->result[replay->result_length++] = byte;
	}
	return true;
}

/* Makes the result of *pieces*: by turns bytes and the number of a hole. */
static bool fill(struct replay *replay, struct fields pieces)
{
	replay->result_length = 0;
	while (more(&pieces)) {
		const struct slice bytes = next(&pieces);
		struct slice digits;
		size_t number = 0;

		if (!put(replay, bytes, false))
			return false;
		if (!more(&pieces))
			break;
		digits = next(&pieces);
		for (size_t i = 0; i < digits.length && number < MOST_HOLES; i++) {
			if (digit(digits.bytes[i]) > 9)
				return false;
			number = number * 10 + digit(digits.bytes[i]);
		}
		if (number >= replay->holes || !put(replay, replay->hole[number], true))
			return false;
	}
	return !pieces.bad && replay->result_length != 0;
}

/* ---- all of it ---- */

/* Makes the result of what is in *file*, behind its head, if that is for this create. */
static bool apply(struct replay *replay, struct slice file, const char *called, char **envp, const char *words)
{
	const char *directories = value_of(envp, "PATH");
	struct fields content = fields_of(file);
	const struct slice caller = next(&content), searched = next(&content), template = next(&content);
	const struct slice probes = next(&content), pieces = next(&content);

	/* Whole to its end, or nothing of it counts. */
	return !content.bad && content.at == content.end && same(caller, text_slice(called))
		&& same(searched, text_slice(directories != NULL ? directories : ""))
		&& matches(replay, fields_of(template), words) && fits_host(fields_of(probes), envp)
		&& fill(replay, fields_of(pieces));
}

/* Reads the file for a document with *number*, under the *config* that is in force; false if there is
 * none to believe. */
static bool read_replay(struct replay *replay, const char *config, uint64_t number, struct slice *content)
{
	static struct statx self;
	static struct text head;
	long length;

	if (look_at(AT_FDCWD, "/proc/self/exe", 0, &self) != 0)
		return false;
	clear(&head);
	append(&head, "gpuruntime-replay 4 " VERSION "\n");
	append(&head, config);
	append(&head, "launcher ");
	append_device(&head, &self);
	append(&head, ":");
	append_number(&head, self.ino);
	append(&head, "\nuser ");
	append_number(&head, (uint64_t)call(SYS_geteuid, 0, 0, 0, 0, 0));
	append(&head, "\n");
	clear(&path);
	append(&path, REPLAY "-");
	append_number(&path, number);
	length = read_trusted(replay->file, sizeof replay->file);
	if (length < (long)head.length || !starts_with(replay->file, head.bytes, head.length))
		return false;
	*content = (struct slice){replay->file + head.length, (size_t)length - head.length};
	return true;
}

/* Prepares the create in *bundle* as one before, for us as *called* under *config*, by which each create
 * that asks for something has one of *words*.  Leaves in *unknown* whether a file would help the next
 * time. */
static bool prepare_replay(
	struct replay *replay, const char *bundle, const char *called, char **envp, const char *config,
	const char *words, bool *unknown)
{
	struct slice content;

	if (!read_bundle(replay, bundle))
		return false;
	*unknown = true;
	return read_replay(replay, config, number_of(replay, words), &content)
		&& apply(replay, content, called, envp, words);
}

/* Writes the result to *fd*; false if that cannot be. */
static bool write_result(const struct replay *replay, long fd)
{
	size_t done = 0;

	while (done < replay->result_length) {
		const long count = call(
			SYS_write, fd, (long)(replay->result + done), (long)(replay->result_length - done), 0, 0);

		if (count <= 0)
			return false;
		done += (size_t)count;
	}
	return true;
}

/* Gives *fd* the owner and the mode that config.json has; false if that cannot be. */
static bool keep_owner(const struct replay *replay, long fd)
{
	static struct statx ours;
	const struct statx *before = &replay->before;

	if (look_at((int)fd, "", AT_EMPTY_PATH, &ours) != 0)
		return false;
	if ((ours.uid != before->uid || ours.gid != before->gid)
		&& call(SYS_fchown, fd, before->uid, before->gid, 0, 0) != 0)
		return false;
	return call(SYS_fchmod, fd, before->mode & 07777, 0, 0, 0) == 0;
}

/* True unless a file of ours could reach the limit of files' sizes, where a signal would end us. */
static bool may_write(void)
{
	static struct resource_limit limit;

	return call(SYS_prlimit64, 0, RLIMIT_FSIZE, 0, (long)&limit, 0) == 0 && limit.soft >= LARGEST_RESULT;
}

/* Replaces config.json by what was prepared, as gpuruntime/oci/bundle.py does; false, and it is what
 * it was, if that cannot be. */
static bool store_replay(const struct replay *replay)
{
	static const char digits[] = "0123456789abcdef";
	static struct text name;
	uint8_t random[8];
	long fd;
	bool stored;

	if (!may_write() || call(SYS_getrandom, (long)random, sizeof random, 0, 0, 0) != (long)sizeof random)
		return false;
	clear(&name);
	append(&name, ".config.json.");
	for (size_t i = 0; i < sizeof random; i++) {
		append_bytes(&name, digits + (random[i] >> 4), 1);
		append_bytes(&name, digits + (random[i] & 15), 1);
	}
	fd = call(SYS_openat, replay->directory, (long)name.bytes,
		O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600, 0);
	if (fd < 0)
		return false;
	stored = write_result(replay, fd) && keep_owner(replay, fd);
	/* Some file systems say only there that there was no room. */
	stored = call(SYS_close, fd, 0, 0, 0, 0) == 0 && stored;
	stored = stored
		&& call(SYS_renameat, replay->directory, (long)name.bytes, replay->directory, (long)"config.json", 0) == 0;
	if (!stored)
		call(SYS_unlinkat, replay->directory, (long)name.bytes, 0, 0, 0);
	return stored;
}

#endif
