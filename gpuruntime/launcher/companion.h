/* SPDX-License-Identifier: Apache-2.0
 *
 * The companion file: what Python compiled for us from the config file that is in force.
 *
 * gpuruntime/launcher/companion.py writes it; README.md has the format.
 */

#ifndef GPURUNTIME_COMPANION_H
#define GPURUNTIME_COMPANION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "environment.h"
#include "files.h"
#include "kernel.h"
#include "text.h"

/* Only tests set these two. */
#ifndef COMPANION
#define COMPANION "/run/gpuruntime/launcher"
#endif
#ifndef CONFIG_ROOT
#define CONFIG_ROOT "/etc"
#endif

/* Names that each end in a NUL, the last one in another: low-level runtimes, and the words without
 * which a config.json asks for nothing.  NULL: only Python can tell.  *config* are the lines that
 * tell the config file from others. */
struct companion {
	const char *runtimes;
	const char *triggers;
	const char *config;
};

/* Leaves in path the config file that the environment selects: 1 found, 0 none, -1 in doubt. */
static int find_config(char **envp, struct statx *info)
{
	static const char *const variables[] = {
		"GPURUNTIME_CONFIG", "NVIDIA_CTK_CONFIG_FILE_PATH", "XDG_CONFIG_HOME", "XDG_CONFIG_HOME", NULL, NULL,
	};
	static const char *const names[] = {
		NULL, NULL, "gpuruntime/config.toml", "nvidia-container-runtime/config.toml",
		"gpuruntime/config.toml", "nvidia-container-runtime/config.toml",
	};

	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		const char *start = variables[i] != NULL ? value_of(envp, variables[i]) : CONFIG_ROOT;
		long error;

		if (start == NULL)
			continue;
		if (names[i] != NULL) {
			join(start, until(start, '\0'), names[i]);
		} else {
			clear(&path);
			append(&path, start);
		}
		error = look_at(AT_FDCWD, path.bytes, 0, info);
		if (error == 0)
			return 1;
		if (error != -ENOENT && error != -ENOTDIR)
			return -1;
	}
	return 0;
}

/* Appends what tells the config in path, or none at all, from any other. */
static void append_config(struct text *out, int found, const struct statx *info)
{
	if (!found) {
		append(out, "missing\n");
		return;
	}
	append(out, "config ");
	append(out, path.bytes);
	append(out, "\nstat ");
	append_identity(out, info);
	append(out, "\n");
}

/* Turns the lines of *word* and a name, from *line on, into names at *end; moves both behind them.
 * That fits if the names are put before the lines, because they are shorter.  False if malformed. */
static bool read_names(const char **line, const char *word, char **end)
{
	const size_t width = until(word, '\0');

	while (starts_with(*line, word, width)) {
		const char *name = *line + width;
		const size_t length = until(name, '\n');

		if (length == 0 || name[length] != '\n')
			return false;
		for (size_t i = 0; i < length; i++)
			(*end)[i] = name[i];
		(*end)[length] = '\0';
		*end += length + 1;
		*line = name + length + 1;
	}
	**end = '\0';
	*end += 1;
	return true;
}

/* Reads the rest of a companion from *line on, into *names before it; false if malformed. */
static bool read_lists(const char *line, char *names, struct companion *out)
{
	static const char passed[] = "creates pass\n";
	static const char denied[] = "creates python\n";
	const char *runtimes = names;
	const char *triggers = NULL;

	if (!read_names(&line, "runtime ", &names))
		return false;
	if (starts_with(line, passed, sizeof passed - 1)) {
		line += sizeof passed - 1;
		triggers = names;
		if (!read_names(&line, "word ", &names))
			return false;
	} else if (starts_with(line, denied, sizeof denied - 1)) {
		line += sizeof denied - 1;
	} else {
		return false;
	}
	if (!equal(line, "end\n"))
		return false;
	out->runtimes = runtimes;
	out->triggers = triggers;
	return true;
}

/* What holds for the config that the environment selects.  Of what is no create, the runtimes
 * without a config file are known here. */
static struct companion find_companion(char **envp, bool creates)
{
	static char content[65537];
	static struct statx info;
	static struct text expected;
	struct companion result = {NULL, NULL, NULL};
	const int found = find_config(envp, &info);

	if (found == 0 && !creates)
		result.runtimes = "runc\0crun\0";
	if (found < 0 || result.runtimes != NULL)
		return result;
	append(&expected, "gpuruntime-launcher 3 " VERSION "\n");
	result.config = expected.bytes + expected.length;
	append_config(&expected, found, &info);
	clear(&path);
	append(&path, COMPANION);
	if (read_trusted(content, sizeof content) >= 0 && starts_with(content, expected.bytes, expected.length))
		read_lists(content + expected.length, content, &result);
	return result;
}

#endif
