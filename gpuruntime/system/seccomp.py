# SPDX-License-Identifier: Apache-2.0
"""Confine a process to the system calls that work below a container's root needs; seccomp(2).

On the start path. What is confined has all its modules: no memory can be made executable any more,
so no library is loaded. It can start no process, open no socket, and look into no other process.
What starts a program, as `ldconfig-mode = "host"` does, cannot be confined so: it must have been
started before, or the process is left alone and the program gets a list of its own, `LDCONFIG`.

A call that is not in the list ends the process with SIGSYS, and the kernel writes an audit record
of it. Calls that are newer than this list get ENOSYS, as on an older kernel, since a newer C
library tries them first. There is one list for all operations: each has most of it anyway.

A kernel without filters confines nothing, and `confine` says so: no container can bring that
about, and the rules of gpuruntime.system.paths hold without it. Every other refusal is an error.
"""

from __future__ import annotations

import _struct
import errno
import posix as os
import sys

from gpuruntime.system import syscalls
from gpuruntime.system.syscalls import SyscallError

MAX_CALLS = 40
_NONE = -1  # aarch64 has no such call
# Name → its numbers on x86-64 and on aarch64, and what needs it. The order is that of use.
CALLS: dict[str, tuple[int, int]] = {
    # Descriptors.
    "close": (3, 57),
    "openat": (257, 56),
    "openat2": (437, 437),  # below the root, in one step
    "newfstatat": (262, 79),
    "statx": (332, 291),  # which mount a descriptor is in
    "fstat": (5, 80),  # what C libraries before 2.33 and after 2.38 make of fstat(3)
    "stat": (4, _NONE),  # what those before 2.33 make of stat(3): of `/`, and to find a module
    "read": (0, 63),
    "pread64": (17, 67),  # libraries of the image
    "write": (1, 64),
    "lseek": (8, 62),  # Python's files
    "fcntl": (72, 25),  # another descriptor of the root, where the walk starts; a lock of our log
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "ioctl": (16, 29),  # only FS_IOC_GETFLAGS, see `program`
    # Names.
    "symlinkat": (266, 36),
    "renameat": (264, 38),
    "unlinkat": (263, 35),
    "mkdirat": (258, 34),
    "fchmod": (91, 52),
    "chmod": (90, 53),  # of a descriptor in /proc; aarch64 has fchmodat alone
    # Mounts: those by descriptor, and mount(2) for kernels before 5.12.
    "mount_setattr": (442, 442),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount": (165, 40),
    "umount2": (166, 39),
    # Memory, which stays data, see `program`.
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "brk": (12, 214),
    # The rest.
    "getrandom": (318, 278),  # names of temporary files
    "rt_sigreturn": (15, 139),  # after the alarm of the deadline
    "restart_syscall": (219, 128),  # after the cgroup was frozen and thawed
    "exit_group": (231, 94),
}
# time.sleep, between the tries of openat2. The clock is read without a call on most machines.
SLEEP = {"clock_nanosleep": (230, 115), "clock_gettime": (228, 113)}
SLEEP_BEFORE_3_11 = {"select": (23, 72), "pselect6": (270, 72), "clock_gettime": (228, 113)}

# The host's ldconfig: it executes, reads, writes one file, and has the start of a static program.
LDCONFIG: dict[str, tuple[int, int]] = {
    "execve": (59, 221),
    "execveat": (322, 281),
    **{
        name: CALLS[name]
        for name in (
            *("close", "openat", "newfstatat", "fstat", "read", "pread64", "write", "lseek"),
            *("readlinkat", "getdents64", "renameat", "unlinkat", "fchmod", "chmod"),
            *("mmap", "munmap", "mremap", "brk", "getrandom", "exit_group"),
        )
    },
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "fcntl": (72, 25),
    "mkdir": (83, _NONE),  # of its auxiliary cache
    "mkdirat": CALLS["mkdirat"],
    "stat": (4, _NONE),
    "lstat": (6, _NONE),
    "readlink": (89, _NONE),
    "rename": (82, _NONE),
    "unlink": (87, _NONE),
    "mprotect": (10, 226),
    "arch_prctl": (158, _NONE),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "prlimit64": (302, 261),
    "sysinfo": (99, 179),
    "uname": (63, 160),
}

# What a tracer puts in place of a call that it answers itself: the kernel then does nothing.
_NO_CALL = 0xFFFFFFFF
_X32_BIT = 0x40000000
# The newest call that was looked at: file_setattr.
_LAST_KNOWN = 469
# Machine → its place in the tables, and AUDIT_ARCH_*.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_PROT_EXEC = 4
_FS_IOC_GETFLAGS = 0x80086601

# linux/bpf_common.h, linux/seccomp.h. struct seccomp_data: nr, arch, instruction pointer (64 bits)
# and six arguments of 64 bits, of which the lower halves are looked at.
_LOAD, _RETURN = 0x20, 0x06
_EQUAL, _ABOVE, _AT_LEAST, _HAS_BITS = 0x15, 0x25, 0x35, 0x45
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
KILL, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_INSTRUCTION, _INSTRUCTION_BYTES = "HBBI", 8


def calls(version: tuple[int, int] = sys.version_info[:2]) -> dict[str, tuple[int, int]]:
    """Return the calls that are allowed where Python has this *version*, with their numbers."""
    return {**CALLS, **(SLEEP if version >= (3, 11) else SLEEP_BEFORE_3_11)}


def program(machine: str, allowed: dict[str, tuple[int, int]]) -> bytes:
    """Return the filter for *machine*, as the kernel reads it; raise KeyError for another one.

    Not every argument is allowed. mmap and mprotect are without PROT_EXEC: nothing that could be
    run comes into memory. ioctl has one request; to others the answer is that this is no
    terminal, which is what Python asks of each text file.
    """
    column, arch = _MACHINES[machine]
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, KILL)]
    code += [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, 1, _NO_CALL), (_RETURN, 0, 0, ALLOW)]
    if machine == "x86_64":
        # The same calls once more, under other numbers.
        code += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, KILL)]
    code += [(_ABOVE, 0, 1, _LAST_KNOWN), (_RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    for name, numbers in allowed.items():
        if numbers[column] == _NONE:
            continue
        rule = [(_RETURN, 0, 0, ALLOW)]
        if name in ("mmap", "mprotect"):
            rule = [
                *_load_argument(2),
                (_HAS_BITS, 0, 1, _PROT_EXEC),
                (_RETURN, 0, 0, KILL),
                *rule,
            ]
        elif name == "ioctl":
            rule = [
                *_load_argument(1),
                (_EQUAL, 1, 0, _FS_IOC_GETFLAGS),
                (_RETURN, 0, 0, ERRNO | errno.ENOTTY),
                *rule,
            ]
        code += [(_EQUAL, 0, len(rule), numbers[column]), *rule]
    code.append((_RETURN, 0, 0, KILL))
    fields = [field for instruction in code for field in instruction]
    return _struct.pack("<" + _INSTRUCTION * len(code), *fields)


def _load_argument(index: int) -> list[tuple[int, int, int, int]]:
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * index)]


def confine(allowed: dict[str, tuple[int, int]] | None = None) -> bool:
    """Confine this process for good, and return whether the kernel can; raise SyscallError.

    To the calls *allowed*, by default those of the hooks. After it neither this process nor a
    program that it executes can gain privileges.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        return False
    code = program(machine, calls() if allowed is None else allowed)
    try:
        syscalls.confine(code, len(code) // _INSTRUCTION_BYTES)
    except SyscallError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True
