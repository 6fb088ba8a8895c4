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

/* Those of create and of run: CREATE_OPTIONS there. */
static const struct option CREATE_OPTIONS[] = {
	{"?", QUERY},
	{"b", VALUE},
	{"bundle", VALUE},
	{"config", VALUE},
	{"console-socket", VALUE},
	{"f", VALUE},
	{"h", QUERY},
	{"help", QUERY},
	{"no-new-keyring", FLAG},
	{"no-pivot", FLAG},
	{"no-subreaper", FLAG},
	{"pid-file", VALUE},
	{"pidfd-socket", VALUE},
	{"preserve-fds", VALUE},
	{"usage", QUERY},
};

/* Those that run has besides: RUN_OPTIONS there. */
static const struct option RUN_OPTIONS[] = {
	{"d", FLAG},
	{"detach", FLAG},
	{"keep", FLAG},
};

/* *creates*: the subcommand makes a container, which create and run do.
 * *understood*: the global options are in their table; *plain*: so are those of create or run, and
 * none asks for help.  *debug*: a log of everything is wanted.
 * The bundle, NULL for the working directory, and crun's other file in place of its config.json,
 * NULL for that, are known of plain ones only. */
struct command {
	bool understood;
	bool creates;
	bool version;
	bool plain;
	bool debug;
	const char *bundle;
	const char *config;
};

/* The one of *count* options whose name is the *length* bytes at *name*, or NULL. */
static const struct option *find_option(
	const struct option *options, size_t count, const char *name, size_t length)
{
	for (size_t i = 0; i < count; i++) {
		if (until(options[i].name, '\0') == length && starts_with(options[i].name, name, length))
			return &options[i];
	}
	return NULL;
}

/* The option of create, or with *runs* of run, whose name is the *length* bytes at *name*, or NULL. */
static const struct option *find_creating(bool runs, const char *name, size_t length)
{
	const struct option *option = find_option(
		CREATE_OPTIONS, sizeof CREATE_OPTIONS / sizeof *CREATE_OPTIONS, name, length);

	if (option == NULL && runs)
		option = find_option(RUN_OPTIONS, sizeof RUN_OPTIONS / sizeof *RUN_OPTIONS, name, length);
	return option;
}

/* Reads the words from the subcommand on, which is create or run; options may follow arguments.
 * False if that is not plain. */
static bool parse_create(char **args, struct command *command)
{
	const bool runs = equal(*args++, "run");


	for (; *args != NULL; args++) {
		const char *name = *args;
		const struct option *option;
		size_t length;

		if (name[0] != '-' || name[1] == '\0')
			continue;
		name += name[1] == '-' ? 2 : 1;
		if (name[0] == '\0')
			break;
		length = until(name, '=');
		option = find_creating(runs, name, length);
		if (option == NULL || option->kind == QUERY)
			return false;
		if (option->kind == VALUE) {
			const char *value = name + length + 1;

			if (name[length] == '\0') {
				args++;
				value = *args;
				if (value == NULL)
					return false;
			}
			/* The last one counts, and is none if it is empty. */
			if (equal(option->name, "b") || equal(option->name, "bundle"))
				command->bundle = *value != '\0' ? value : NULL;
			if (equal(option->name, "f") || equal(option->name, "config"))
				command->config = *value != '\0' ? value : NULL;
		}
	}
	return true;
}

/* Reads the global options and the subcommand from *args*, which do not include argv[0]. */
static struct command parse(char **args)
{
	struct command command = {false, false, false, false, false, NULL, NULL};
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
		option = find_option(OPTIONS, sizeof OPTIONS / sizeof *OPTIONS, name, length);
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
		if (equal(option->name, "debug"))
			command.debug = true;
		if (option->kind == VALUE && name[length] == '\0') {
			args++;
			if (*args == NULL)
				return command;
		}
	}
	command.understood = true;
	command.creates = !asks && *args != NULL && (equal(*args, "create") || equal(*args, "run"));
	command.plain = command.creates && parse_create(args, &command);
	return command;
}

#endif
