/* SPDX-License-Identifier: Apache-2.0
 *
 * The native front of the OCI runtime and of the hooks: decide, then exec.
 *
 * Contract: README.md beside this file.  Freestanding and static, so that no
 * dynamic loader and no C library reads the environment before we do.  No
 * heap; every buffer is fixed, and what does not fit is treated as unusable.
 * The launcher never interprets a container: in any doubt Python decides.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernel.h"
#include "options.h"
#include "text.h"

#if !defined(LIBDIR) || !defined(PYTHON) || !defined(CLI_PYTHON) || !defined(VERSION)
#error "LIBDIR, PYTHON, CLI_PYTHON and VERSION are string constants of the build, see README.md"
#endif

/* Only tests set these three. */
#ifndef COMPANION
#define COMPANION "/run/gpuruntime/launcher"
#endif
#ifndef CONFIG_ROOT
#define CONFIG_ROOT "/etc"
#endif
#ifndef STANDARD_PATH
#define STANDARD_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#endif

#define LIBRARY "import sys;sys.path.append(\"" LIBDIR "\");"
#define SHIM_CODE LIBRARY "from gpuruntime.shim import main;main(\"" CLI_PYTHON "\")"
#define HOOK_CODE LIBRARY "from hooks.entry import main;main(\"" CLI_PYTHON "\")"

/* Writable pointers that launch() needs in front of argv[0]: Python's own
 * arguments go there, so an argument list of any length costs no copy. */
#define ROOM 16

/* What is being looked at, what the companion must begin with, what is said. */
static struct text path;
static struct text expected;
static struct text message;

/* The last component of argv[0].  Not initialised here: without initialised data there is no data
 * segment, which the linker would pad to the largest page, 64 KiB on aarch64. */
static const char *program;

/* The value of *name* in the environment: its first entry, as getenv(3); NULL if unset or empty. */
static const char *value_of(char **envp, const char *name)
{
	size_t length = until(name, '\0');

	for (; *envp != NULL; envp++) {
		if (starts_with(*envp, name, length) && (*envp)[length] == '=') {
			const char *value = *envp + length + 1;

			return *value != '\0' ? value : NULL;
		}
	}
	return NULL;
}

/* Begins a message with our name, as the shim's begin. */
static void begin(const char *word)
{
	clear(&message);
	append_plain(&message, program);
	append(&message, ": ");
	append(&message, word);
}

/* ---- Python ---- */

/* Says what came of *attempt* on *object* and leaves. */
static _Noreturn void fail(const char *attempt, const char *object, long error, const char *hint, int status)
{
	begin("runtime: cannot ");
	append(&message, attempt);
	append(&message, " ");
	append_quoted(&message, object);
	append(&message, ": ");
	if (error == -ENOENT) {
		append(&message, "no such file or directory");
	} else if (error == -EACCES) {
		append(&message, "permission denied");
	} else if (error == -ENOEXEC) {
		append(&message, "exec format error");
	} else if (error == -E2BIG) {
		append(&message, "argument list too long");
	} else {
		append(&message, "errno ");
		append_number(&message, (uint64_t)-error);
	}
	append(&message, "\nhint: ");
	append(&message, hint);
	append(&message, "\n");
	write_out(2, &message);
	leave(status);
}

/* Becomes Python running *code* with argv as its arguments; overwrites the room before argv.
 * If that cannot be, leaves as a shell would: 127 not found, 126 not executable. */
static _Noreturn void start_python(char **argv, char **envp, const char *code)
{
	static const char *const isolated[] = {PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c"};
	const size_t count = sizeof isolated / sizeof *isolated;
	long error;

	argv--;
	*argv = (char *)(uintptr_t)code;
	argv -= count;
	for (size_t i = 0; i < count; i++)
		argv[i] = (char *)(uintptr_t)isolated[i];
	error = call(SYS_execve, (long)PYTHON, (long)argv, (long)envp, 0, 0);
	fail("execute", PYTHON, error, "install Python 3.9 or newer as \"" PYTHON "\"",
		error == -ENOENT || error == -ENOTDIR ? 127 : 126);
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

/* The hook role: trusts nothing of its caller, reads no variable, and becomes hooks.entry. */
static _Noreturn void run_hook(char **argv)
{
	static const struct signal_action by_default;
	static const uint64_t none;
	static const char *const environment[] = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", NULL};

	long error;

	close_inherited();
	fill_standard();
	error = call(SYS_chdir, (long)"/", 0, 0, 0, 0);
	if (error != 0)
		fail("enter", "/", error, "let the hook search the root directory", 1);
	call(SYS_umask, 022, 0, 0, 0, 0);
	for (long number = 1; number <= LAST_SIGNAL; number++)
		call(SYS_rt_sigaction, number, (long)&by_default, 0, sizeof none, 0);
	call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&none, 0, sizeof none, 0);
	start_python(argv, (char **)(uintptr_t)environment, HOOK_CODE);
}

/* ---- runtime role: the low-level runtime ---- */

/* Joins *directory* and *name* in path. */
static void join(const char *directory, size_t length, const char *name)
{
	clear(&path);
	append_bytes(&path, directory, length);
	if (length != 0 && directory[length - 1] != '/')
		append(&path, "/");
	append(&path, name);
}

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

/* Appends the device number as Python's st_dev shows it, which is the C library's makedev. */
static void append_device(struct text *out, const struct statx *info)
{
	uint64_t number = (uint64_t)(info->dev_major & 0xfffU) << 8;

	number |= (uint64_t)(info->dev_major & ~0xfffU) << 32;
	number |= info->dev_minor & 0xffU;
	number |= (uint64_t)(info->dev_minor & ~0xffU) << 12;
	append_number(out, number);
}

/* True if nobody but root and ourselves can have written what *info* describes. */
static bool trusted(const struct statx *info)
{
	long me = call(SYS_geteuid, 0, 0, 0, 0, 0);

	return (info->uid == 0 || (long)info->uid == me) && (info->mode & 022) == 0;
}

/* Reads the companion file, at most *size* - 1 bytes, into *buffer*; true if it may be believed. */
static bool read_companion(char *buffer, size_t size)
{
	static struct statx info;
	size_t length = 0;
	long count = 0;
	bool ok;
	int fd;

	clear(&path);
	append(&path, COMPANION);
	while (path.length != 0 && path.bytes[path.length - 1] != '/')
		path.length--;
	path.bytes[path.length] = '\0';
	if (look_at(AT_FDCWD, path.bytes, 0, &info) != 0 || (info.mode & S_IFMT) != S_IFDIR || !trusted(&info))
		return false;
	fd = (int)call(SYS_openat, AT_FDCWD, (long)COMPANION, O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0, 0);
	if (fd < 0)
		return false;
	ok = look_at(fd, "", AT_EMPTY_PATH, &info) == 0 && (info.mode & S_IFMT) == S_IFREG && trusted(&info);
	while (ok && length < size) {
		count = call(SYS_read, fd, (long)(buffer + length), (long)(size - length), 0, 0);
		if (count <= 0)
			break;
		length += (size_t)count;
	}
	call(SYS_close, fd, 0, 0, 0, 0);
	if (!ok || count < 0 || length >= size)
		return false;
	buffer[length] = '\0';
	return until(buffer, '\0') == length;
}

/* Turns the lines "runtime NAME" at *line*, up to "end", into names that each end in a NUL, the last
 * followed by another; in place, which fits because names are shorter than lines.  False if malformed. */
static bool read_candidates(const char *line, char *names)
{
	static const char word[] = "runtime ";
	const size_t width = sizeof word - 1;
	size_t used = 0;

	while (starts_with(line, word, width)) {
		size_t length = until(line + width, '\n');

		if (length == 0 || line[width + length] != '\n')
			return false;
		for (size_t i = 0; i < length; i++)
			names[used + i] = line[width + i];
		names[used + length] = '\0';
		used += length + 1;
		line += width + length + 1;
	}
	names[used] = '\0';
	return equal(line, "end\n");
}

/* The candidates for the config that the environment selects, each ended by a NUL and the last by
 * two; NULL when only Python can tell. */
static const char *choose_candidates(char **envp)
{
	static char companion[65537];
	static struct statx info;
	const int found = find_config(envp, &info);

	if (found == 0)
		return "runc\0crun\0";
	if (found < 0)
		return NULL;
	clear(&expected);
	append(&expected, "gpuruntime-launcher 1\nconfig ");
	append(&expected, path.bytes);
	append(&expected, "\nstat ");
	append_device(&expected, &info);
	append(&expected, " ");
	append_number(&expected, info.ino);
	append(&expected, " ");
	append_number(&expected, info.size);
	append(&expected, " ");
	/* Before 1970 this wraps to what Python never prints: no match, so Python. */
	append_number(&expected, (uint64_t)info.mtime.seconds * 1000000000U + info.mtime.nanoseconds);
	append(&expected, "\n");
	if (!read_companion(companion, sizeof companion))
		return NULL;
	if (!starts_with(companion, expected.bytes, expected.length))
		return NULL;
	return read_candidates(companion + expected.length, companion) ? companion : NULL;
}

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

/* Becomes the low-level runtime with the arguments untouched; returns only if that cannot be. */
static void pass_through(char **argv, char **envp)
{
	char *const called = argv[0];
	const char *candidates = choose_candidates(envp);

	if (candidates == NULL || !find_runtime(candidates, envp))
		return;
	argv[0] = path.bytes;
	call(SYS_execve, (long)path.bytes, (long)argv, (long)envp, 0, 0);
	argv[0] = called;
}

/* Which of the two signals that CPython sets to "ignore" at its start were ignored before: the
 * shim restores the others for the low-level runtime. */
static const char *ignored_signals(void)
{
	static const char *const digits[] = {"0", "1", "2", "3"};
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
	return digits[index];
}

/* Becomes the shim: which signals were ignored, and who the launcher is, so that the shim does not
 * take it for a low-level runtime, come before argv. */
static _Noreturn void start_shim(char **argv, char **envp)
{
	static struct statx self;

	clear(&expected);
	if (look_at(AT_FDCWD, "/proc/self/exe", 0, &self) == 0) {
		append_device(&expected, &self);
		append(&expected, ":");
		append_number(&expected, self.ino);
	}
	argv--;
	*argv = expected.bytes;
	argv--;
	*argv = (char *)(uintptr_t)ignored_signals();
	start_python(argv, envp, SHIM_CODE);
}

/* The runtime role: transparent.  Nothing of the process is changed, nothing is left open. */
static _Noreturn void run_runtime(char **argv, char **envp)
{
	const struct command command = parse(argv + 1);

	if (command.understood && command.version) {
		clear(&message);
		append(&message, "gpu-container-runtime version " VERSION "\n\n");
		write_out(1, &message);
	}
	if (command.understood && !command.creates)
		pass_through(argv, envp);
	start_shim(argv, envp);
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
	if (is_one_of(program, runtimes))
		run_runtime(argv, envp);
	begin("request: no program of ours has this name\n");
	append(&message, "hint: call it by one of its links, \"gpu-container-runtime\" or \"gpu-cdi-hook\"\n");
	write_out(2, &message);
	leave(1);
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
