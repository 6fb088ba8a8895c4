/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel's interface as far as the launcher needs it: numbers, structures, one call.
 *
 * Written out here because the kernel's own headers are not installed everywhere, and the C
 * library's describe the C library.  All that differs between architectures is in the first part.
 */

#ifndef GPURUNTIME_KERNEL_H
#define GPURUNTIME_KERNEL_H

#include <stddef.h>
#include <stdint.h>

/* ---- the kernel, per architecture ---- */

#if defined(__x86_64__)

enum {
	SYS_read = 0, SYS_write = 1, SYS_close = 3, SYS_rt_sigaction = 13, SYS_rt_sigprocmask = 14,
	SYS_setitimer = 38, SYS_getpid = 39, SYS_clone = 56, SYS_execve = 59, SYS_wait4 = 61, SYS_kill = 62,
	SYS_fcntl = 72, SYS_chdir = 80, SYS_fchmod = 91, SYS_fchown = 93, SYS_umask = 95, SYS_geteuid = 107,
	SYS_getppid = 110, SYS_setsid = 112, SYS_rt_sigtimedwait = 128, SYS_prctl = 157, SYS_getdents64 = 217,
	SYS_clock_gettime = 228, SYS_exit_group = 231, SYS_openat = 257, SYS_unlinkat = 263, SYS_renameat = 264,
	SYS_readlinkat = 267, SYS_ppoll = 271, SYS_dup3 = 292, SYS_pipe2 = 293, SYS_prlimit64 = 302,
	SYS_getrandom = 318, SYS_statx = 332, SYS_close_range = 436,
	O_DIRECT = 040000, O_DIRECTORY = 0200000, O_NOFOLLOW = 0400000,
};

/* One system call; the result is the kernel's, errors are negative. */
static long call(long number, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	long result;

	__asm__ volatile("syscall"
		: "=a"(result)
		: "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
		: "rcx", "r11", "memory");
	return result;
}

#define ENTRY \
	".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n" \
	"\tsub $256, %rsp\n\tand $-16, %rsp\n\tcall start\n\tud2\n"

#elif defined(__aarch64__)

enum {
	SYS_dup3 = 24, SYS_fcntl = 25, SYS_unlinkat = 35, SYS_renameat = 38, SYS_chdir = 49, SYS_fchmod = 52,
	SYS_fchown = 55, SYS_openat = 56, SYS_close = 57, SYS_pipe2 = 59, SYS_getdents64 = 61, SYS_read = 63,
	SYS_write = 64, SYS_ppoll = 73, SYS_readlinkat = 78, SYS_exit_group = 94, SYS_setitimer = 103,
	SYS_clock_gettime = 113, SYS_kill = 129, SYS_rt_sigaction = 134, SYS_rt_sigprocmask = 135,
	SYS_rt_sigtimedwait = 137, SYS_setsid = 157, SYS_umask = 166, SYS_prctl = 167, SYS_getpid = 172,
	SYS_getppid = 173, SYS_geteuid = 175, SYS_clone = 220, SYS_execve = 221, SYS_wait4 = 260,
	SYS_prlimit64 = 261, SYS_getrandom = 278, SYS_statx = 291, SYS_close_range = 436,
	O_DIRECT = 0200000, O_DIRECTORY = 040000, O_NOFOLLOW = 0100000,
};

/* One system call; the result is the kernel's, errors are negative. */
static long call(long number, long a, long b, long c, long d, long e)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;

	__asm__ volatile("svc #0"
		: "+r"(x0)
		: "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
		: "memory", "cc");
	return x0;
}

#define ENTRY \
	".globl _start\n_start:\n\tmov x29, #0\n\tmov x30, #0\n\tmov x0, sp\n" \
	"\tsub sp, sp, #256\n\tbl start\n\tbrk #0\n"

#else
#error "the launcher knows x86-64 and aarch64"
#endif

/* ---- the kernel, the same everywhere ---- */

enum {
	ENOENT = 2, EINTR = 4, E2BIG = 7, ENOEXEC = 8, EACCES = 13, ENOTDIR = 20, ELOOP = 40,
	O_WRONLY = 1, O_RDWR = 2, O_CREAT = 0100, O_EXCL = 0200, O_NONBLOCK = 04000, O_CLOEXEC = 02000000,
	O_PATH = 010000000,
	AT_FDCWD = -100, AT_SYMLINK_NOFOLLOW = 0x100, AT_EMPTY_PATH = 0x1000, STATX_BASIC_STATS = 0x7ff,
	S_IFMT = 0170000, S_IFREG = 0100000, S_IFDIR = 0040000,
	F_GETFD = 1, SIG_IGN = 1, SIG_SETMASK = 2, SIGKILL = 9, SIGPIPE = 13, SIGCHLD = 17, SIGXFSZ = 25, LAST_SIGNAL = 64,
	PR_SET_PDEATHSIG = 1, PR_SET_DUMPABLE = 4, CLOCK_MONOTONIC = 1, POLLIN = 1, POLLOUT = 4, WNOHANG = 1,
	RLIMIT_FSIZE = 1, RLIMIT_NOFILE = 7,
};

struct timestamp {
	int64_t seconds;
	uint32_t nanoseconds;
	int32_t reserved;
};

/* statx(2), one layout on all architectures. */
struct statx {
	uint32_t mask, blksize;
	uint64_t attributes;
	uint32_t nlink, uid, gid;
	uint16_t mode, spare0;
	uint64_t ino, size, blocks, attributes_mask;
	struct timestamp atime, btime, ctime, mtime;
	uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
	uint64_t spare[14];
};
_Static_assert(sizeof(struct statx) == 256, "struct statx is 256 bytes in the kernel");

/* The kernel's sigaction, whose set is one word, not the C library's. */
struct signal_action {
	uintptr_t handler;
	unsigned long flags;
	uintptr_t restorer;
	uint64_t mask;
};

struct resource_limit {
	uint64_t soft;
	uint64_t hard;
};

struct clock_time {
	int64_t seconds, nanoseconds;
};

struct poll_entry {
	int32_t fd;
	int16_t events, returned;
};

enum { ITIMER_REAL = 0 };

struct timer {
	struct { int64_t seconds, microseconds; } interval, value;
};

static _Noreturn void leave(int status)
{
	for (;;)
		call(SYS_exit_group, status, 0, 0, 0, 0);
}

/* Fills *info about *path* below *dirfd*, following links; 0 or -errno. */
static long look_at(int dirfd, const char *path, int flags, struct statx *info)
{
	return call(SYS_statx, dirfd, (long)path, flags, STATX_BASIC_STATS, (long)info);
}

#endif
