# SPDX-License-Identifier: Apache-2.0
"""A short log of the last messages of hooks, which not every low-level runtime shows.

crun drops what a hook writes, and reports only its exit status. The hook calls `record`, which
must not decide whether a container starts: it makes no directory, waits for nobody, never raises.
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
# Of each of the two files.
MAX_BYTES = 64 << 10
MAX_LINES = 16
_WARNING = ": warning: "
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def record(text: str, status: int, directory: str = RUN_DIRECTORY) -> None:
    """Append what a hook said, *text*, before it ended with *status*; all of it if it failed.

    Of a hook that did not fail, its warnings. Only in a directory that is there and root's alone,
    which one of an unprivileged user namespace is not.
    """
    lines = text.splitlines()
    if status == 0:
        lines = [line for line in lines if _WARNING in line]
    if not lines:
        return
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    word = WARNED if status == 0 else FAILED
    # The last say why.
    data = "".join(f"{now} {word} {escape(line)}\n" for line in lines[-MAX_LINES:]).encode()
    try:
        _append(directory, data)
    except OSError:
        # Read-only, full, not ours: the hook has said it on stderr as well.
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
            # One write: those of others come before or after it.
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
        import fcntl  # noqa: PLC0415 (once in many warnings)

        # Whoever has the lock renames the file; others lose their lines rather than wait.
        fcntl.flock(dirfd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(NAME, dir_fd=dirfd, follow_symlinks=False).st_ino == status.st_ino:
            os.rename(NAME, OLD, src_dir_fd=dirfd, dst_dir_fd=dirfd)
        fresh = os.open(NAME, _APPEND, 0o600, dir_fd=dirfd)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return fresh


def _check(status: os.stat_result) -> None:
    """Raise PermissionError unless *status* is that of a file of ours with one name."""
    if not (stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and _is_ours(status)):
        raise PermissionError(NAME)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() == 0 and not stat.S_IMODE(status.st_mode) & 0o022
