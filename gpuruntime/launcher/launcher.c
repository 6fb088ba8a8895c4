/* SPDX-License-Identifier: Apache-2.0
 *
 * The native front of the OCI runtime and of the hooks: decide, then exec.
 *
 * Contract: README.md beside this file.  Freestanding and static, so that no
 * dynamic loader and no C library reads the environment before we do.  No
 * heap; every buffer is fixed, and what does not fit is treated as unusable.
 * The launcher never interprets a container: a create with no word of ours in
 * it is passed on, one whose bytes were prepared before is prepared again with
 * the bytes that Python wrote (replay.h), and in any doubt Python decides.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "companion.h"
#include "environment.h"
#include "files.h"
#include "interpreter.h"
#include "kernel.h"
#include "options.h"
#include "replay.h"
#include "report.h"
#include "supervise.h"
#include "text.h"
#include "triggers.h"

/* Only tests set it. */
#ifndef STANDARD_PATH
#define STANDARD_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#endif

/* A name of the incumbent's; beside the launcher's own file, it is the command line. */
#define TOOL "nvidia-ctk"

/* ---- Python ---- */

/* Appends the code that Python runs: main() of *module*, with the *options* behind its first argument.
 * The bytecode of the modules is in one file for each *role*, if there is one for this interpreter:
 * gpuruntime/bytecode.py. */
static void append_code(struct text *code, const struct interpreter *interpreter, const char *role,
	const char *module, const char *options)
{
	append(code, "import sys;sys.path.append(\"");
	append(code, interpreter->library.bytes);
	append(code,
		"\")\n"
		"try:\n"
		" import marshal,_frozen_importlib_external as f\n"
		" library=sys.path[-1]\n"
		" with open(library+\"/gpuruntime/__pycache__/start-");
	append(code, role);
	append(code,
		".\"+sys.implementation.cache_tag,\"rb\") as s:b=s.read()\n"
		" if b[:4]==f.MAGIC_NUMBER:\n"
		"  code,modules=marshal.loads(memoryview(b)[4:])\n"
		"  exec(code,{\"modules\":modules,\"library\":library})\n"
		"except Exception:pass\n"
		"from ");
	append(code, module);
	append(code, " import main;main(\"");
	append(code, interpreter->slow.bytes);
	append(code, "\"");
	append(code, options);
	append(code, ")");
}

/* Becomes Python running main() of *module* with argv as its arguments; overwrites the room before
 * argv.  If that cannot be, leaves as a shell would: 127 not found, 126 not executable. */
static _Noreturn void start_python(
	char **argv, char **envp, const char *role, const char *module, const char *options)
{
	static const char *const isolated[] = {"-I", "-S", "-B", "-X", "utf8", "-c"};
	static struct interpreter interpreter;
	static struct text code;
	const char *word = interpreter.words.bytes;
	const size_t count = sizeof isolated / sizeof *isolated;
	long error;

	find_interpreter(&interpreter);
	append_code(&code, &interpreter, role, module, options);
	if (!fits(&code))
		fail("use", path.bytes, -TOO_LARGE, "install gpuruntime at a shorter path", 127);
	argv--;
	*argv = code.bytes;
	argv -= count;
	for (size_t i = 0; i < count; i++)
		argv[i] = (char *)(uintptr_t)isolated[i];
	argv -= interpreter.count;
	for (size_t i = 0; i < interpreter.count; i++) {
		argv[i] = (char *)(uintptr_t)word;
		word += until(word, '\0') + 1;
	}
	error = call(SYS_execve, (long)argv[0], (long)argv, (long)envp, 0, 0);
	fail("execute", argv[0], error, interpreter.hint, error == -ENOENT || error == -ENOTDIR ? 127 : 126);
}

/* ---- hook role ---- */

/* Closes every descriptor from 3 on.  Kernels before 5.9 lack close_range(2); there the hard limit
 * bounds the walk, with a floor because a caller may have lowered the limit below what it left open. */
static void close_inherited(void)
{
	static struct resource_limit limit;
	uint64_t end = 65536;

	if (call(SYS_close_range, 3, 0xffffffffL, 0, 0, 0) == 0)
		return;
	call(SYS_prlimit64, 0, RLIMIT_NOFILE, 0, (long)&limit, 0);
	if (limit.hard > end)
		end = limit.hard;
	if (end > 1048576)
		end = 1048576;
	for (long fd = 3; fd < (long)end; fd++)
		call(SYS_close, fd, 0, 0, 0, 0);
}

/* Opens /dev/null on each standard descriptor that is closed; leaves with 1 if it cannot. */
static void fill_standard(void)
{
	for (long fd = 0; fd < 3; fd++) {
		long opened;

		if (call(SYS_fcntl, fd, F_GETFD, 0, 0, 0) >= 0)
			continue;
		opened = call(SYS_openat, AT_FDCWD, (long)"/dev/null", O_RDWR, 0, 0);
		if (opened != fd)
			fail("open", "/dev/null", opened, "give the hook its standard descriptors", 1);
	}
}

/* What a hook's Python gets: nothing of the caller's. */
static const char *const hook_environment[] = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", NULL};

/* Becomes hooks.report, which says that the worker has not done its work: *how*, with a number. */
static _Noreturn void report_failure(char **argv, const char *how, uint64_t value)
{
	static const struct timer limit = {.value = {.seconds = REPORT_S}};
	static struct text number;

	call(SYS_setitimer, ITIMER_REAL, (long)&limit, 0, 0, 0);
	append_number(&number, value);
	argv -= 2;
	argv[0] = argv[2];
	argv[1] = (char *)(uintptr_t)how;
	argv[2] = number.bytes;
	start_python(argv, (char **)(uintptr_t)hook_environment, "hook", "hooks.report", "");
}

/* Has a worker, which becomes hooks.entry, do the work, and leaves with its status. */
static _Noreturn void supervise(char **argv)
{
	static struct worker worker;
	const long started = start_worker(&worker);
	long status = -1;

	if (started < 0)
		report_failure(argv, "errno", (uint64_t)-started);
	if (started == 0)
		start_python(argv, (char **)(uintptr_t)hook_environment, "hook", "hooks.entry", ",is_supervised=True");
	if (relay(&worker))
		status = reap(&worker);
	if (status < 0) {
		end_worker(&worker);
		report_failure(argv, worker.has_started ? "late" : "not-started", worker.seconds);
	}
	if ((status & 0x7f) != 0)
		report_failure(argv, "signal", (uint64_t)status & 0x7f);
	leave((int)(status >> 8 & 0xff));
}

/* The hook role: trusts nothing of its caller, and reads no variable. */
static _Noreturn void run_hook(char **argv)
{
	static const struct signal_action by_default;
	static const uint64_t none;
	long error;

	/* A container that shares our pid namespace must not look into this process. */
	call(SYS_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
	close_inherited();
	fill_standard();
	error = call(SYS_chdir, (long)"/", 0, 0, 0, 0);
	if (error != 0)
		fail("enter", "/", error, "let the hook search the root directory", 1);
	call(SYS_umask, 022, 0, 0, 0, 0);
	for (long number = 1; number <= LAST_SIGNAL; number++)
		call(SYS_rt_sigaction, number, (long)&by_default, 0, sizeof none, 0);
	call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&none, 0, sizeof none, 0);
	supervise(argv);
}

/* ---- runtime role: the low-level runtime ---- */

/* True if path is a program that we may become.  Ourselves are passed over with a message, or we
 * would exec for ever. */
static bool usable(const struct statx *self)
{
	static struct statx info;

	if (look_at(AT_FDCWD, path.bytes, 0, &info) != 0)
		return false;
	if ((info.mode & S_IFMT) != S_IFREG || (info.mode & 0111) == 0)
		return false;
	if (info.ino != self->ino || info.dev_major != self->dev_major || info.dev_minor != self->dev_minor)
		return true;
	begin("the low-level runtime ");
	append_quoted(&message, path.bytes);
	append(&message, " is this program itself: skipped\n");
	write_out(2, &message);
	return false;
}

/* True if the *length* bytes at *directory* are one of the colon separated *directories*. */
static bool lists(const char *directories, const char *directory, size_t length)
{
	for (;;) {
		size_t width = until(directories, ':');

		if (width == length && starts_with(directories, directory, length))
			return true;
		if (directories[width] == '\0')
			return false;
		directories += width + 1;
	}
}

/* Searches *name* in the absolute ones of *directories* that are not *known*; leaves it in path. */
static bool search(const char *name, const char *directories, const char *known, const struct statx *self)
{
	for (;;) {
		size_t length = until(directories, ':');

		/* An empty or relative entry means the current directory, which is a bundle. */
		if (directories[0] == '/' && !lists(known, directories, length)) {
			join(directories, length, name);
			if (usable(self))
				return true;
		}
		if (directories[length] == '\0')
			return false;
		directories += length + 1;
	}
}

/* Leaves the first usable candidate in path. */
static bool find_runtime(const char *candidates, char **envp)
{
	static struct statx self;
	const char *directories = value_of(envp, "PATH");

	if (look_at(AT_FDCWD, "/proc/self/exe", 0, &self) != 0)
		return false;
	if (directories == NULL)
		directories = "";
	for (; *candidates != '\0'; candidates += until(candidates, '\0') + 1) {
		bool found;

		if (candidates[until(candidates, '/')] == '/') {
			clear(&path);
			append(&path, candidates);
			found = usable(&self);
		} else {
			found = search(candidates, directories, "", &self)
				|| search(candidates, STANDARD_PATH, directories, &self);
		}
		if (found)
			return true;
	}
	return false;
}

/* True if this create, whose command line is plain, asks for nothing that anyone of us would add. */
static bool asks_for_nothing(const struct command *command, const char *triggers)
{
	const char *bundle = command->bundle != NULL ? command->bundle : ".";

	if (triggers == NULL)
		return false;
	if (command->config != NULL) {
		/* crun resolves it before it enters the bundle. */
		clear(&path);
		append(&path, command->config);
	} else {
		join(bundle, until(bundle, '\0'), "config.json");
	}
	return may_ask(triggers) == 0;
}

/* Prepares this create, whose command line is plain and which asks for something, by what Python
 * wrote for the same before.  Leaves in *unknown* whether that would help the next time. */
static bool prepare(
	struct replay *replay, const struct command *command, const struct companion *companion, char **argv,
	char **envp, bool *unknown)
{
	const char *bundle = command->bundle != NULL ? command->bundle : ".";

#ifdef WITHOUT_REPLAY
	/* `make bench REPLAY=off` measures what repeating a create is worth. */
	return false;
#endif
	/* A log of all that is done, and crun's other file, are Python's. */
	if (companion->triggers == NULL || command->debug || command->config != NULL)
		return false;
	return prepare_replay(replay, bundle, argv[0], envp, companion->config, companion->triggers, unknown);
}

/* Becomes the low-level runtime with the arguments untouched; returns only if that cannot be.  Leaves
 * in *unknown* whether it could be, if Python left us what we lack. */
static void pass_through(const struct command *command, char **argv, char **envp, bool *unknown)
{
	static struct replay replay;
	char *const called = argv[0];
	const struct companion companion = find_companion(envp, command->creates);
	bool replays = false;

	*unknown = companion.runtimes == NULL;
	if (companion.runtimes == NULL)
		return;
	if (command->creates && !asks_for_nothing(command, companion.triggers)) {
		replays = prepare(&replay, command, &companion, argv, envp, unknown);
		if (!replays)
			return;
	}
	if (!find_runtime(companion.runtimes, envp))
		return;
	if (replays && !store_replay(&replay))
		return;
	argv[0] = path.bytes;
	call(SYS_execve, (long)path.bytes, (long)argv, (long)envp, 0, 0);
	argv[0] = called;
}

/* Which of the two signals that CPython sets to "ignore" at its start were ignored before: the
 * shim restores the others for the low-level runtime.  And 4 for what is *unknown* here. */
static const char *told(bool unknown)
{
	static const char *const digits[] = {"0", "1", "2", "3", "4", "5", "6", "7"};
	static const uintptr_t ignore = 1;
	static struct signal_action pipe;
	static struct signal_action filesize;
	size_t index = 0;

	call(SYS_rt_sigaction, SIGPIPE, 0, (long)&pipe, sizeof pipe.mask, 0);
	call(SYS_rt_sigaction, SIGXFSZ, 0, (long)&filesize, sizeof filesize.mask, 0);
	if (pipe.handler == ignore)
		index |= 1;
	if (filesize.handler == ignore)
		index |= 2;
	if (unknown)
		index |= 4;
	return digits[index];
}

/* Becomes the shim: which signals were ignored and what is *unknown*, and who the launcher is, so
 * that the shim does not take it for a low-level runtime, come before argv. */
static _Noreturn void start_shim(char **argv, char **envp, bool unknown)
{
	static struct statx self;
	static struct text identity;

	if (look_at(AT_FDCWD, "/proc/self/exe", 0, &self) == 0) {
		append_device(&identity, &self);
		append(&identity, ":");
		append_number(&identity, self.ino);
	}
	argv--;
	*argv = identity.bytes;
	argv--;
	*argv = (char *)(uintptr_t)told(unknown);
	start_python(argv, envp, "shim", "gpuruntime.shim.main", "");
}

/* The runtime role: transparent.  Nothing of the process is changed, nothing is left open. */
static _Noreturn void run_runtime(char **argv, char **envp)
{
	const struct command command = parse(argv + 1);
	/* The engine's word on passing calls through: "off", or "only", which forbids Python. */
	const char *fast = value_of(envp, "GPURUNTIME_FAST");
	const bool off = fast != NULL && equal(fast, "off");
	bool unknown = false;

	if (command.understood && command.version) {
		clear(&message);
		/* Programs look for these words in what its names print. */
		if (starts_with(program, "nvidia-", 7))
			append(&message, "NVIDIA Container Runtime version " VERSION "\n");
		append(&message, "gpu-container-runtime version " VERSION "\n\n");
		write_out(1, &message);
	}
	if (command.understood && !off && (!command.creates || command.plain))
		pass_through(&command, argv, envp, &unknown);
	if (fast != NULL && equal(fast, "only")) {
		begin("runtime: only Python can answer this call, and GPURUNTIME_FAST=only forbids it");
		give_up("unset GPURUNTIME_FAST, which is for tests", 1);
	}
	start_shim(argv, envp, unknown);
}

/* ---- the incumbent's tool, which is hooks and the command line ---- */

/* Becomes the hook that "hook NAME" asks for, else the command line.  A hook may be started with the
 * image's environment, which the command line's interpreter and C library would act on. */
static _Noreturn void run_tool(char **argv, char **envp)
{
	size_t word = 1;
	long error;

	while (argv[word] != NULL && argv[word][0] == '-') {
		const bool config = equal(argv[word], "--config") || equal(argv[word], "-config");

		word++;
		/* Its value, unless that makes a hook of it: a hook has less to fear. */
		if (config && argv[word] != NULL && !equal(argv[word], "hook"))
			word++;
	}
	if (argv[word] != NULL && equal(argv[word], "hook")) {
		/* Without that word; the options in front of it are the hook's. */
		for (; word > 0; word--)
			argv[word] = argv[word - 1];
		run_hook(argv + 1);
	}
	error = find_beside();
	if (error != 0)
		fail("read the link", "/proc/self/exe", error, "mount /proc", 127);
	/* By this name the command line has the incumbent's defaults. */
	join(home.bytes, home.length, TOOL);
	error = call(SYS_execve, (long)path.bytes, (long)argv, (long)envp, 0, 0);
	fail("execute", path.bytes, error, "install gpuruntime with the incumbent's names, or call \"gpuruntime\"",
		error == -ENOENT || error == -ENOTDIR ? 127 : 126);
}

/* ---- start ---- */

/* True if *name* is in *names*, which ends in NULL. */
static bool is_one_of(const char *name, const char *const *names)
{
	for (; *names != NULL; names++) {
		if (equal(name, *names))
			return true;
	}
	return false;
}

/* Takes the role that argv[0] names.  Needs ROOM writable pointers before argv[0]. */
static _Noreturn void launch(char **argv, char **envp)
{
	static const char *const runtimes[] = {
		"gpu-container-runtime", "nvidia-container-runtime", "nvidia-container-runtime.cdi",
		"nvidia-container-runtime.legacy", NULL,
	};
	static const char *const hooks[] = {
		"gpu-cdi-hook", "gpu-container-runtime-hook", "nvidia-cdi-hook", "nvidia-container-runtime-hook",
		"nvidia-container-toolkit", NULL,
	};

	program = argv[0] != NULL ? argv[0] : "";
	while (program[until(program, '/')] == '/')
		program += until(program, '/') + 1;
	if (is_one_of(program, hooks))
		run_hook(argv);
	if (equal(program, TOOL))
		run_tool(argv, envp);
	if (is_one_of(program, runtimes))
		run_runtime(argv, envp);
	begin("request: no program of ours has this name\n");
	append(&message, "hint: call it by one of its links, \"gpu-container-runtime\" or \"gpu-cdi-hook\"\n");
	write_out(2, &message);
	leave(2);
}

#ifndef LAUNCHER_TWIN

__asm__(ENTRY);

/* Called by _start with the stack as the kernel left it: argc, argv, NULL, environment, NULL. */
_Noreturn void start(long *stack);
_Noreturn void start(long *stack)
{
	char **argv = (char **)(stack + 1);

	launch(argv, argv + *stack + 1);
}

#endif
