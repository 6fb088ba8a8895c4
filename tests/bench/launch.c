/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch REPORT PROGRAM [ARGUMENT...]: run a program, add one line on it to the file REPORT: wall
 * clock in ns, CPU time in us of it and of what it waited for, peak memory in KiB, exit status.
 * Small and static: a child begins with the peak memory of the process that spawns it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static long long nanoseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static long long microseconds(const struct timeval *time)
{
    return time->tv_sec * 1000000LL + time->tv_usec;
}

int main(int argc, char **argv)
{
    struct rusage usage;
    long long begin, end;
    int report, status, code;
    pid_t child;

    if (argc < 3)
        return 2;
    report = open(argv[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (report < 0) {
        perror(argv[1]);
        return 2;
    }
    begin = nanoseconds();
    if (posix_spawn(&child, argv[2], NULL, NULL, argv + 2, environ)) {
        fprintf(stderr, "launch: cannot run \"%s\"\n", argv[2]);
        return 127;
    }
    while (wait4(child, &status, 0, &usage) < 0)
        ;
    end = nanoseconds();
    code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    dprintf(report, "%lld %lld %ld %d\n", end - begin,
            microseconds(&usage.ru_utime) + microseconds(&usage.ru_stime), usage.ru_maxrss, code);
    return code;
}
