# SPDX-License-Identifier: Apache-2.0
"""`python -m gpunode.mps_start MEMORY PROGRAM ARGUMENTS`: the program with MEMORY as its /dev/shm.

An MPS control daemon and its clients share memory below /dev/shm, and the containers of the
clients have the directory MEMORY there. The daemon gets a mount namespace for that, so that the
/dev/shm of the host stays as it is.
"""

from __future__ import annotations

import os
import sys

from gpuruntime.system import syscalls

# What daemons and clients share memory in.
SHARED = "/dev/shm"  # noqa: S108 (a mount point)


def main(memory: str, program: str, *arguments: str) -> None:
    """Become the program; exit with a line that says why if that is not possible."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        # Mounts of the host still arrive, those of this namespace stay in it.
        _mount("none", "/", syscalls.MS_REC | syscalls.MS_SLAVE)
        _mount(memory, SHARED, syscalls.MS_BIND)
        os.execv(program, [program, *arguments])
    except OSError as error:
        sys.exit(f'cannot run {program} with "{memory}" as {SHARED}: {error.strerror}')


def _mount(source: str, target: str, flags: int) -> None:
    """Mount *source* on the directory *target*; raise OSError."""
    place = os.open(target, os.O_PATH | os.O_DIRECTORY)
    try:
        syscalls.mount(source, place, "", flags)
    finally:
        os.close(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
