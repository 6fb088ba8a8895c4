/* SPDX-License-Identifier: Apache-2.0
 *
 * A hook's work is done by a child, the worker, which is abandoned when its time is over.
 *
 * A file system of the container that does not answer holds every process that asks it, and no
 * signal ends that.  The runtime waits for whoever holds its pipes, so the worker's standard error
 * is a pipe of ours.  This process touches no file of the container.
 */

#ifndef GPURUNTIME_SUPERVISE_H
#define GPURUNTIME_SUPERVISE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernel.h"

enum {
	/* So long the worker may take until our code runs and says how long it needs: with too little
	 * memory, Python's own start can go on for ever. */
	START_S = 60,
	MOST_DEADLINE_S = 600,
	/* After its deadline the worker still has time to say which step was late. */
	GRACE_MS = 400,
	/* What it says beyond this is left out. */
	MOST_REPORT = 64 << 10,
	/* The worker's descriptor for its deadlines: a number of seconds each, of 8 bytes. */
	DEADLINE_FD = 3,
};

struct worker {
	long pid;
	/* Our ends of the pipes; -1: closed. */
	int report, deadlines;
	uint64_t seconds;
	/* In ms of the monotonic clock. */
	int64_t end;
};

static int64_t now(void)
{
	struct clock_time time = {0, 0};

	call(SYS_clock_gettime, CLOCK_MONOTONIC, (long)&time, 0, 0, 0);
	return time.seconds * 1000 + time.nanoseconds / 1000000;
}

/* The time up to *end*, zero if it has passed. */
static struct clock_time until_end(int64_t end)
{
	const int64_t left = end - now();

	if (left <= 0)
		return (struct clock_time){0, 0};
	return (struct clock_time){left / 1000, left % 1000 * 1000000};
}

/* Waits for events of the *count* descriptors until *end*; how many have some, or the negative error. */
static long wait_for(struct poll_entry *entries, size_t count, int64_t end)
{
	/* The kernel leaves in it what is left. */
	struct clock_time left = until_end(end);

	return call(SYS_ppoll, (long)entries, (long)count, (long)&left, 0, 0);
}

/* Writes *length* bytes, at most a page, to standard error.  A pipe that nobody empties must not hold
 * us: it gets one chance. */
static void say(const char *bytes, size_t length)
{
	static bool is_stuck;
	struct poll_entry entry = {2, POLLOUT, 0};

	if (is_stuck || length == 0)
		return;
	is_stuck = wait_for(&entry, 1, now() + GRACE_MS) != 1 || (entry.returned & POLLOUT) == 0;
	if (!is_stuck)
		call(SYS_write, 2, (long)bytes, (long)length, 0, 0);
}

/* Gives the worker *seconds* from now. */
static void set_deadline(struct worker *worker, uint64_t seconds)
{
	worker->seconds = seconds < MOST_DEADLINE_S ? seconds : MOST_DEADLINE_S;
	worker->end = now() + (int64_t)worker->seconds * 1000 + GRACE_MS;
}

/* Relays what the worker says until it has closed its standard error; false if its time is over. */
static bool relay(struct worker *worker)
{
	static char page[4096];
	size_t left = MOST_REPORT;

	for (;;) {
		struct poll_entry entries[] = {{worker->report, POLLIN, 0}, {worker->deadlines, POLLIN, 0}};
		const long ready = wait_for(entries, sizeof entries / sizeof *entries, worker->end);

		if (ready == -EINTR)
			continue;
		if (ready <= 0)
			return false;
		if (entries[1].returned != 0) {
			uint64_t seconds = 0;

			/* The worker closes it when it has said all that it needs. */
			if (call(SYS_read, worker->deadlines, (long)&seconds, sizeof seconds, 0, 0) == sizeof seconds)
				set_deadline(worker, seconds);
			else
				worker->deadlines = -1;
		}
		if (entries[0].returned != 0) {
			const long count = call(SYS_read, worker->report, (long)page, sizeof page, 0, 0);
			const size_t length = count > 0 ? (size_t)count : 0;

			if (length == 0)
				return true;
			say(page, length < left ? length : left);
			left -= length < left ? length : left;
		}
	}
}

/* The status of the worker as wait4(2) has it, or a negative number if its time is over.  Needs SIGCHLD
 * blocked since before the worker started. */
static long reap(const struct worker *worker)
{
	static const uint64_t child = 1UL << (SIGCHLD - 1);

	for (;;) {
		int status = 0;
		struct clock_time left;

		if (call(SYS_wait4, worker->pid, (long)&status, WNOHANG, 0, 0) == worker->pid)
			return status;
		left = until_end(worker->end);
		if (left.seconds == 0 && left.nanoseconds == 0)
			return -1;
		call(SYS_rt_sigtimedwait, (long)&child, 0, (long)&left, sizeof child, 0);
	}
}

/* Closes both pipes, but for what is the worker's DEADLINE_FD by now. */
static void close_all(const int *report, const int *deadlines)
{
	const int fds[] = {report[0], report[1], deadlines[0], deadlines[1]};

	for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
		if (fds[i] > DEADLINE_FD)
			call(SYS_close, fds[i], 0, 0, 0, 0);
	}
}

/* Starts the worker.  0 in the worker, else in this process; a negative error if it cannot be. */
static long start_worker(struct worker *worker)
{
	static const uint64_t child = 1UL << (SIGCHLD - 1);
	static const uint64_t none;
	const long us = call(SYS_getpid, 0, 0, 0, 0, 0);
	int report[2] = {-1, -1};
	int deadlines[2] = {-1, -1};
	long error = call(SYS_pipe2, (long)report, O_CLOEXEC, 0, 0, 0);

	if (error == 0)
		error = call(SYS_pipe2, (long)deadlines, O_CLOEXEC, 0, 0, 0);
	if (error == 0) {
		call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&child, 0, sizeof child, 0);
		error = worker->pid = call(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	}
	if (error < 0) {
		/* There may be too few descriptors for what says so. */
		close_all(report, deadlines);
		return error;
	}
	if (worker->pid == 0) {
		/* What it starts ends with it, and it ends with us. */
		call(SYS_setsid, 0, 0, 0, 0, 0);
		call(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
		if (call(SYS_getppid, 0, 0, 0, 0, 0) != us)
			leave(1);
		call(SYS_dup3, report[1], 2, 0, 0, 0);
		call(SYS_dup3, deadlines[1], DEADLINE_FD, 0, 0, 0);
		close_all(report, deadlines);
		call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&none, 0, sizeof none, 0);
		return 0;
	}
	call(SYS_close, report[1], 0, 0, 0, 0);
	call(SYS_close, deadlines[1], 0, 0, 0, 0);
	worker->report = report[0];
	worker->deadlines = deadlines[0];
	set_deadline(worker, START_S);
	return worker->pid;
}

/* Ends the worker and what it has started, as far as a signal can. */
static void end_worker(const struct worker *worker)
{
	call(SYS_kill, -worker->pid, SIGKILL, 0, 0, 0);
	call(SYS_kill, worker->pid, SIGKILL, 0, 0, 0);
}

#endif
