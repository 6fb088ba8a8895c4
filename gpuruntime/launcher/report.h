/* SPDX-License-Identifier: Apache-2.0
 *
 * What the launcher says before it gives up.
 */

#ifndef GPURUNTIME_REPORT_H
#define GPURUNTIME_REPORT_H

#include <stddef.h>
#include <stdint.h>

#include "kernel.h"
#include "text.h"

/* Reasons beside the kernel's, negative as those are. */
enum { UNTRUSTED = 10001, NO_FILE, TOO_LARGE, MALFORMED };

static struct text message;

/* The last component of argv[0].  Not initialised here: without initialised data there is no data
 * segment, which the linker would pad to the largest page, 64 KiB on aarch64. */
static const char *program;

/* Begins a message with our name, as the shim's begin. */
static void begin(const char *word)
{
	clear(&message);
	append_plain(&message, program);
	append(&message, ": ");
	append(&message, word);
}

/* Ends the message with what is to be done about it, and leaves. */
static _Noreturn void give_up(const char *hint, int status)
{
	append(&message, "\nhint: ");
	append(&message, hint);
	append(&message, "\n");
	write_out(2, &message);
	leave(status);
}

/* Says what came of *attempt* on *object* and leaves. */
static _Noreturn void fail(const char *attempt, const char *object, long error, const char *hint, int status)
{
	static const struct {
		long error;
		const char *words;
	} known[] = {
		{-ENOENT, "no such file or directory"},
		{-EACCES, "permission denied"},
		{-ENOEXEC, "exec format error"},
		{-E2BIG, "argument list too long"},
		{-ELOOP, "a link"},
		{-UNTRUSTED, "others than root may write it, or its directory"},
		{-NO_FILE, "not a regular file"},
		{-TOO_LARGE, "too long"},
		{-MALFORMED, "not in the format that is documented"},
	};

	begin("runtime: cannot ");
	append(&message, attempt);
	append(&message, " ");
	append_quoted(&message, object);
	append(&message, ": ");
	for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
		if (known[i].error == error) {
			append(&message, known[i].words);
			give_up(hint, status);
		}
	}
	append(&message, "errno ");
	append_number(&message, (uint64_t)-error);
	give_up(hint, status);
}

#endif
