/* SPDX-License-Identifier: Apache-2.0
 *
 * Which Python runs our code, and how: constants of the build, or a file beside the launcher.
 *
 * README.md has the format of the file.
 */

#ifndef GPURUNTIME_INTERPRETER_H
#define GPURUNTIME_INTERPRETER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "files.h"
#include "kernel.h"
#include "report.h"
#include "text.h"

#if !defined(LIBDIR) || !defined(PYTHON) || !defined(CLI_PYTHON) || !defined(VERSION)
#error "LIBDIR, PYTHON, CLI_PYTHON and VERSION are string constants of the build, see README.md"
#endif

/* Writable pointers that start_python() needs in front of argv[0]: Python's own arguments go there,
 * so an argument list of any length costs no copy. */
enum { MOST_INTERPRETER_WORDS = 16, ROOM = 32 };

/* The words of the interpreter, each ended by a NUL, the directory with our modules, and the words of
 * the slow path's interpreter with "\n", as a Python literal has it, between them; and what helps if
 * they are no good. */
struct interpreter {
	size_t count;
	const char *hint;
	struct text words;
	struct text library;
	struct text slow;
};

/* The directory of the launcher itself, with a slash behind. */
static struct text home;

/* True if the *length* bytes can stand in a Python literal as they are. */
static bool is_plain(const char *bytes, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		if (bytes[i] < ' ' || bytes[i] > '~' || bytes[i] == '"' || bytes[i] == '\\')
			return false;
	}
	return length != 0;
}

/* True if *out* is not full: then nothing was dropped. */
static bool fits(const struct text *out)
{
	return out->length + 1 < sizeof out->bytes;
}

/* Appends the value of the *length* bytes at *value*, where "@/" is our directory. */
static void append_value(struct text *out, const char *value, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		if (value[i] == '@' && i + 1 < length && value[i + 1] == '/') {
			append(out, home.bytes);
			i++;
		} else {
			append_bytes(out, value + i, 1);
		}
	}
}

/* Reads lines of *word* and a value from *line on, at most *most*, to *out*, and moves *line behind
 * them; how many, or more than *most* if one is malformed.  Each ends in a NUL; if *between* is not
 * NULL, that comes between them instead.  The first is an absolute path. */
static size_t read_values(
	const char **line, const char *word, size_t most, struct text *out, const char *between)
{
	const size_t width = until(word, '\0');
	size_t count = 0;

	while (starts_with(*line, word, width) && count <= most) {
		const char *value = *line + width;
		const size_t length = until(value, '\n');
		const size_t start = out->length;

		if (!is_plain(value, length) || value[length] != '\n')
			return most + 1;
		if (count != 0 && between != NULL)
			append(out, between);
		append_value(out, value, length);
		if (count == 0 && out->bytes[start] != '/')
			return most + 1;
		if (between == NULL)
			append_bytes(out, "", 1);
		*line = value + length + 1;
		count++;
	}
	return count;
}

/* Reads the text of the file; false if malformed. */
static bool read_interpreter(const char *line, struct interpreter *out)
{
	static const char head[] = "gpuruntime-interpreter 1\n";
	const char *words;
	size_t slow;

	if (!is_plain(home.bytes, home.length) || !starts_with(line, head, sizeof head - 1))
		return false;
	line += sizeof head - 1;
	if (read_values(&line, "library ", 1, &out->library, NULL) != 1)
		return false;
	words = line;
	out->count = read_values(&line, "python ", MOST_INTERPRETER_WORDS, &out->words, NULL);
	if (out->count == 0 || out->count > MOST_INTERPRETER_WORDS)
		return false;
	slow = read_values(&line, "slow ", MOST_INTERPRETER_WORDS, &out->slow, "\\n");
	if (slow == 0)
		read_values(&words, "python ", MOST_INTERPRETER_WORDS, &out->slow, "\\n");
	return slow <= MOST_INTERPRETER_WORDS && equal(line, "end\n") && fits(&out->words)
		&& fits(&out->library) && fits(&out->slow);
}

/* Leaves the file beside the launcher in path and its directory in home, or the negative error. */
static long find_beside(void)
{
	long length = call(
		SYS_readlinkat, AT_FDCWD, (long)"/proc/self/exe", (long)home.bytes, (long)sizeof home.bytes - 1, 0);

	if (length < 0)
		return length;
	while (length > 0 && home.bytes[length - 1] != '/')
		length--;
	home.bytes[length] = '\0';
	home.length = (size_t)length;
	join(home.bytes, home.length, "launcher.interpreter");
	return 0;
}

/* Fills *out* with the interpreter to use; leaves with 127 if a file names one that cannot be. */
static void find_interpreter(struct interpreter *out)
{
	static char content[4097];
	long error = find_beside();

	if (error != 0)
		fail("read the link", "/proc/self/exe", error, "mount /proc", 127);
	error = read_trusted(content, sizeof content);
	if (error == -ENOENT) {
		out->count = 1;
		out->hint = "install Python 3.9 or newer as \"" PYTHON "\"";
		append(&out->words, PYTHON);
		append(&out->library, LIBDIR);
		append(&out->slow, CLI_PYTHON);
		return;
	}
	out->hint = "install gpuruntime again, or correct \"launcher.interpreter\" beside the launcher";
	if (error >= 0)
		error = read_interpreter(content, out) ? 0 : -MALFORMED;
	if (error < 0)
		fail("use", path.bytes, error, out->hint, 127);
}

#endif
