/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line of the OCI runtime: only as much as decides whether Python is needed.
 *
 * gpuruntime/oci/argv.py reads the same grammar in full; tests compare the tables and run one list
 * of command lines through both.
 */

#ifndef GPURUNTIME_OPTIONS_H
#define GPURUNTIME_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

#include "text.h"

enum kind {
	FLAG,    /* alone, or with =value */
	VALUE,   /* takes =value or the next argument */
	QUERY,   /* help and version: nothing is created */
};

struct option {
	const char *name;
	enum kind kind;
};

/* runc's and crun's global options: GLOBAL_OPTIONS of oci/argv.py, which says why each is here. */
static const struct option OPTIONS[] = {
	{"?", QUERY},
	{"V", QUERY},
	{"cgroup-manager", VALUE},
	{"criu", VALUE},
	{"debug", FLAG},
	{"h", QUERY},
	{"help", QUERY},
	{"log", VALUE},
	{"log-format", VALUE},
	{"log-level", VALUE},
	{"root", VALUE},
	{"rootless", VALUE},
	{"systemd-cgroup", FLAG},
	{"usage", QUERY},
	{"v", QUERY},
	{"version", QUERY},
};

struct command {
	bool understood;
	bool creates;
	bool version;
};

/* The option whose name is the *length* bytes at *name*, or NULL. */
static const struct option *find_option(const char *name, size_t length)
{
	for (size_t i = 0; i < sizeof OPTIONS / sizeof *OPTIONS; i++) {
		if (until(OPTIONS[i].name, '\0') == length && starts_with(OPTIONS[i].name, name, length))
			return &OPTIONS[i];
	}
	return NULL;
}

/* Reads the global options and the subcommand from *args*, which do not include argv[0]. */
static struct command parse(char **args)
{
	struct command command = {false, false, false};
	bool asks = false;

	for (; *args != NULL; args++) {
		const char *name = *args;
		const struct option *option;
		size_t length;

		if (name[0] != '-' || name[1] == '\0')
			break;
		name += name[1] == '-' ? 2 : 1;
		if (name[0] == '\0') {
			args++;
			break;
		}
		length = until(name, '=');
		option = find_option(name, length);
		if (option == NULL)
			return command;
		if (option->kind == QUERY) {
			/* Go reads --version=false as "not asked": too clever for us. */
			if (name[length] == '=')
				return command;
			asks = true;
			if (equal(name, "version") || equal(name, "v") || equal(name, "V"))
				command.version = true;
		}
		if (option->kind == VALUE && name[length] == '\0') {
			args++;
			if (*args == NULL)
				return command;
		}
	}
	command.understood = true;
	command.creates = !asks && *args != NULL && equal(*args, "create");
	return command;
}

#endif
