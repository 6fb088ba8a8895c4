# SPDX-License-Identifier: Apache-2.0
"""A short log of the last messages of hooks, which not every low-level runtime shows.

crun discards the output of a hook and reports only its exit status. The hook calls `record`, which
must not affect the start of a container: it creates no directory, never waits and never raises.
"""

from __future__ import annotations

import _stat as stat
import posix as os
import time

from gpuruntime.errors import escape
from gpuruntime.snapshots import RUN_DIRECTORY

NAME = "hook-failures.log"
OLD = f"{NAME}.old"
PATH = f"{RUN_DIRECTORY}/{NAME}"
FAILED, WARNED = "failed", "warned"
# The limit of each of the two files.
MAX_BYTES = 64 << 10
MAX_LINES = 16
_WARNING = ": warning: "
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Read at import: the system call filter of a hook does not allow geteuid(2).
_IS_ROOT = os.geteuid() == 0
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def record(text: str, status: int, directory: str = RUN_DIRECTORY) -> None:
    """Append the output *text* of a hook that ended with *status*: if 0, its warnings only.

    The directory must exist and be owned and writable by root only. It is not in an unprivileged
    user namespace.
    """
    lines = text.splitlines()
    if status == 0:
        lines = [line for line in lines if _WARNING in line]
    if not lines:
        return
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time()))
    word = WARNED if status == 0 else FAILED
    # The last lines contain the reason.
    data = "".join(f"{now} {word} {escape(line)}\n" for line in lines[-MAX_LINES:]).encode()
    try:
        _append(directory, data)
    except (OSError, MemoryError):
        # The directory is read-only, full or not ours. The hook has also written to stderr.
        return


def parse(log: str) -> list[tuple[str, str, str]]:
    """Return (time, FAILED or WARNED, text) of each line of *log*, the contents of the file."""
    rows = [line.split(" ", 2) for line in log.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == len(("time", "word", "text"))]


def _append(directory: str, data: bytes) -> None:
    dirfd = os.open(directory, _DIRECTORY)
    try:
        if not _is_ours(os.fstat(dirfd)):
            return
        fd = _open(dirfd, len(data))
        try:
            # One write, so that lines of other processes do not mix with these.
            os.write(fd, data)
        finally:
            os.close(fd)
    finally:
        os.close(dirfd)


def _open(dirfd: int, size: int) -> int:
    """Return the log in *dirfd*, opened, with room for *size* bytes; raise OSError."""
    fd = os.open(NAME, _APPEND, 0o600, dir_fd=dirfd)
    try:
        status = os.fstat(fd)
        _check(status)
        if status.st_size + size <= MAX_BYTES:
            return fd
        # The process with the lock renames the file; others lose their lines instead of waiting.
        os.lockf(fd, os.F_TLOCK, 0)
        if os.stat(NAME, dir_fd=dirfd, follow_symlinks=False).st_ino == status.st_ino:
            os.rename(NAME, OLD, src_dir_fd=dirfd, dst_dir_fd=dirfd)
        fresh = os.open(NAME, _APPEND, 0o600, dir_fd=dirfd)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return fresh


def _check(status: os.stat_result) -> None:
    """Raise PermissionError unless *status* is of a regular file of root with one link."""
    if not (stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and _is_ours(status)):
        raise PermissionError(NAME)


def _is_ours(status: os.stat_result) -> bool:
    return _IS_ROOT and status.st_uid == 0 and not stat.S_IMODE(status.st_mode) & 0o022
