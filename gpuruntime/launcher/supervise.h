/* SPDX-License-Identifier: Apache-2.0
 *
 * A hook's work is done by a child, the worker, which is abandoned when its time is over.
 *
 * A file system of the container that does not answer holds every process that asks it, and no
 * signal ends that.  The runtime waits for whoever holds its pipes, so the worker's standard output
 * and error are pipes of ours.  This process touches no file of the container.
 */

#ifndef GPURUNTIME_SUPERVISE_H
#define GPURUNTIME_SUPERVISE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernel.h"

enum {
	/* The first deadline, until the worker sets one: with too little memory, Python may never finish
	 * starting. */
	START_S = 60,
	/* How long the report on a failed worker may take, including the start of Python. */
	REPORT_S = 10,
	/* The longest deadline, one day: discovery-timeout has no maximum. */
	MOST_DEADLINE_S = 86400,
	/* Added to each deadline: the worker reports which step was late. */
	GRACE_MS = 400,
	/* Output on standard error beyond this is dropped. */
	MOST_REPORT = 64 << 10,
};

struct worker {
	long pid;
	/* Our ends of the pipes that are its standard output and error; -1: it has closed that one. */
	int output, error;
	/* How much of its report is still relayed. */
	size_t left;
	/* Whether our code runs in it, which has said how long it needs. */
	bool has_started;
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

/* Writes *length* bytes, at most a page, to *fd*, 1 or 2.  A pipe that nobody empties must not hold
 * us: it gets one chance. */
static void say(int fd, const char *bytes, size_t length)
{
	static bool is_stuck[3];
	struct poll_entry entry = {fd, POLLOUT, 0};

	if (is_stuck[fd] || length == 0)
		return;
	is_stuck[fd] = wait_for(&entry, 1, now() + GRACE_MS) != 1 || (entry.returned & POLLOUT) == 0;
	if (!is_stuck[fd])
		call(SYS_write, fd, (long)bytes, (long)length, 0, 0);
}

/* Gives the worker *seconds* from now, and this process a little more: SIGALRM then ends it, should a
 * write have held it, and that ends the worker. */
static void set_deadline(struct worker *worker, uint64_t seconds)
{
	struct timer limit = {.value = {.seconds = 2}};

	worker->seconds = seconds < MOST_DEADLINE_S ? seconds : MOST_DEADLINE_S;
	worker->end = now() + (int64_t)worker->seconds * 1000 + GRACE_MS;
	limit.value.seconds += (int64_t)worker->seconds;
	call(SYS_setitimer, ITIMER_REAL, (long)&limit, 0, 0, 0);
}

/* Reads from the worker's standard output: a deadline if it is 8 bytes, else what a person asked for. */
static void relay_output(struct worker *worker)
{
	static union {
		char bytes[4096];
		uint64_t seconds;
	} packet;
	const long count = call(SYS_read, worker->output, (long)&packet, sizeof packet, 0, 0);

	if (count <= 0)
		worker->output = -1;
	else if (count != sizeof packet.seconds)
		say(1, packet.bytes, (size_t)count);
	else {
		worker->has_started = true;
		set_deadline(worker, packet.seconds);
	}
}

/* Relays what the worker says on standard error. */
static void relay_error(struct worker *worker)
{
	static char page[4096];
	const long count = call(SYS_read, worker->error, (long)page, sizeof page, 0, 0);
	const size_t length = count <= 0 ? 0 : (size_t)count < worker->left ? (size_t)count : worker->left;

	if (count <= 0)
		worker->error = -1;
	say(2, page, length);
	worker->left -= length;
}

/* Relays what the worker says until it has closed both pipes; false if its time is over. */
static bool relay(struct worker *worker)
{
	while (worker->output >= 0 || worker->error >= 0) {
		struct poll_entry entries[] = {{worker->output, POLLIN, 0}, {worker->error, POLLIN, 0}};
		const long ready = wait_for(entries, sizeof entries / sizeof *entries, worker->end);

		/* A worker that writes without end is late as well. */
		if (now() >= worker->end)
			return false;
		if (ready == -EINTR)
			continue;
		if (ready <= 0)
			return false;
		if (entries[0].returned != 0)
			relay_output(worker);
		if (entries[1].returned != 0)
			relay_error(worker);
	}
	return true;
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

/* Closes both pipes. */
static void close_all(const int *output, const int *error)
{
	const int fds[] = {output[0], output[1], error[0], error[1]};

	for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
		call(SYS_close, fds[i], 0, 0, 0, 0);
}

/* Starts the worker.  0 in the worker, else in this process; a negative error if it cannot be. */
static long start_worker(struct worker *worker)
{
	static const struct signal_action ignored = {.handler = SIG_IGN};
	static const uint64_t child = 1UL << (SIGCHLD - 1);
	static const uint64_t none;
	const long us = call(SYS_getpid, 0, 0, 0, 0, 0);
	int output[2] = {-1, -1};
	int error[2] = {-1, -1};
	/* A read gives what one write has written. */
	long result = call(SYS_pipe2, (long)output, O_CLOEXEC | O_DIRECT, 0, 0, 0);

	if (result == 0)
		result = call(SYS_pipe2, (long)error, O_CLOEXEC, 0, 0, 0);
	if (result == 0) {
		call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&child, 0, sizeof child, 0);
		result = worker->pid = call(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	}
	if (result < 0) {
		/* There may be too few descriptors for what says so. */
		close_all(output, error);
		return result;
	}
	if (result == 0) {
		/* What it starts ends with it, and it ends with us. */
		call(SYS_setsid, 0, 0, 0, 0, 0);
		call(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
		if (call(SYS_getppid, 0, 0, 0, 0, 0) != us)
			leave(1);
		call(SYS_dup3, output[1], 1, 0, 0, 0);
		call(SYS_dup3, error[1], 2, 0, 0, 0);
		close_all(output, error);
		call(SYS_rt_sigprocmask, SIG_SETMASK, (long)&none, 0, sizeof none, 0);
		return 0;
	}
	call(SYS_close, output[1], 0, 0, 0, 0);
	call(SYS_close, error[1], 0, 0, 0, 0);
	/* Whether somebody reads what the worker says does not decide whether the container starts. */
	call(SYS_rt_sigaction, SIGPIPE, (long)&ignored, 0, sizeof ignored.mask, 0);
	call(SYS_rt_sigaction, SIGXFSZ, (long)&ignored, 0, sizeof ignored.mask, 0);
	worker->left = MOST_REPORT;
	worker->output = output[0];
	worker->error = error[0];
	set_deadline(worker, START_S);
	return result;
}

/* Ends the worker and what it has started, as far as a signal can. */
static void end_worker(const struct worker *worker)
{
	call(SYS_kill, -worker->pid, SIGKILL, 0, 0, 0);
	call(SYS_kill, worker->pid, SIGKILL, 0, 0, 0);
}

#endif
