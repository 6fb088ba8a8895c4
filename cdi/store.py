# SPDX-License-Identifier: Apache-2.0
"""Save a CDI spec: a temporary file in the same directory, fsync, rename, mode 0644."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from cdi.errors import CdiError

SPEC_MODE = 0o644


def save(path: str, text: str, *, may_trust: Callable[[os.stat_result], bool]) -> bool:
    """Write *text* to *path* atomically, making its directory (0755); tell whether it changed.

    A file that is there is replaced by a new one, never written to: it may be a link, or hard
    linked. Raises CdiError "untrusted" if others may write to the directory, and OSError.
    """
    directory, name = os.path.split(os.path.abspath(path))
    os.makedirs(directory, mode=0o755, exist_ok=True)
    dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not may_trust(os.fstat(dirfd)):
            raise CdiError("untrusted", f'"{directory}" is not root\'s alone to write')
        data = text.encode()
        if _holds(name, dirfd, data):
            return False
        # The ending keeps scanners of the directory away from the unfinished file.
        temporary = f"spec.{os.urandom(8).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=dirfd)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fchmod(fd, SPEC_MODE)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=dirfd, dst_dir_fd=dirfd)
        except BaseException:
            os.unlink(temporary, dir_fd=dirfd)
            raise
        os.fsync(dirfd)
        return True
    finally:
        os.close(dirfd)


def _holds(name: str, dirfd: int, data: bytes) -> bool:
    """Tell whether *name* is already a regular file of mode 0644 that holds *data*."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=dirfd)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != SPEC_MODE:
            return False
        if status.st_nlink != 1 or status.st_size != len(data):
            return False
        return os.read(fd, len(data) + 1) == data
    finally:
        os.close(fd)
