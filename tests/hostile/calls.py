# SPDX-License-Identifier: Apache-2.0
"""Make every system call that gpuruntime.system.syscalls wraps; print how each one ended.

Run in a mount namespace of its own: `calls.py WORK ours|naive`. Naive is the control: the same
calls without the wrappers. Standard output is one JSON object: call → "done", or its error.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gpuruntime.system import bpf, syscalls

# Descriptors that a call returned and a program that is executed would have as well.
inherited: list[str] = []


def kept(name: str, fd: int) -> int:
    """Note whether *fd* is closed on exec; return it."""
    if not fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
        inherited.append(name)
    return fd


def calls(work: Path) -> dict[str, Callable[[], object]]:
    """Return the calls, by the name that the kernel has for each, in an order that works."""
    place = os.open(work, os.O_PATH | os.O_DIRECTORY)
    made: dict[str, int] = {}

    def fsopen() -> None:
        made["tmpfs"] = kept("fsmount", syscalls.new_tmpfs(1 << 16, 0))

    def open_tree() -> None:
        # Without the flag, as a caller may forget it.
        clone = syscalls.OPEN_TREE_CLONE
        made["tree"] = kept("open_tree", syscalls.open_tree(place, "", clone | 0x1000))

    def mount() -> None:
        syscalls.mount("tmpfs", place, "tmpfs", 0)
        made["mounted"] = os.open(work, os.O_PATH | os.O_DIRECTORY)

    return {
        "openat2": lambda: kept("openat2", syscalls.openat2(place, ".", os.O_PATH, 0x10)),
        "fsopen": fsopen,
        "open_tree": open_tree,
        "mount_setattr": lambda: syscalls.mount_setattr(made["tree"], 0),
        "move_mount": lambda: syscalls.move_mount(made["tree"], place),
        "mount": mount,
        "umount2": lambda: syscalls.umount_detached(made["mounted"]),
        "fstatfs": lambda: syscalls.kind_of(place),
        "close_range": lambda: syscalls.close_range(100),
        "unshare": lambda: syscalls.unshare(syscalls.CLONE_NEWUTS),
        "setns": lambda: syscalls.setns(
            os.open("/proc/self/ns/uts", os.O_RDONLY), syscalls.CLONE_NEWUTS
        ),
        # R0 = 0; exit.
        "bpf": lambda: kept("bpf", bpf.load(bytes.fromhex("b700000000000000 9500000000000000"))),
        "prctl": syscalls.die_with_parent,
        "capset": syscalls.drop_privileges,
    }


def naive(work: Path) -> dict[str, Callable[[], object]]:
    """Return calls that give up where a signal came."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: Callable[..., int], *arguments: object) -> None:
        if function(*arguments) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    place = os.open(work, os.O_PATH | os.O_DIRECTORY)
    return {
        "open_tree": lambda: call(libc.syscall, 428, place, b"", 0x1001),
        "unshare": lambda: call(libc.unshare, syscalls.CLONE_NEWUTS),
        "prctl": lambda: call(libc.prctl, 1, 9, 0, 0, 0),
    }


def main() -> None:
    """Make the calls and print."""
    work = Path(sys.argv[1])
    ended = {}
    for name, call in (calls if sys.argv[2] == "ours" else naive)(work).items():
        try:
            call()
        except (OSError, KeyError) as error:
            ended[name] = str(error)
        else:
            ended[name] = "done"
    print(json.dumps({"ended": ended, "inherited": inherited}))


if __name__ == "__main__":
    main()
