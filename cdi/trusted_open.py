# SPDX-License-Identifier: Apache-2.0
"""Open spec directories and specs only if their ownership, and that of their path, is trusted.

On the start path. *may_trust* returns whether owner and mode are acceptable; it is called for the
opened file, and for each symlink and directory on its path.
"""

from __future__ import annotations

import errno
import os
import stat

from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# The kernel's limit: path_resolution(7).
_MAX_LINKS = 40


def open_directory(path: str, may_trust: Callable[[os.stat_result], bool]) -> int:
    """Return a descriptor of the directory *path*; raise CdiError if it is missing or not trusted.

    The cause of the CdiError is a FileNotFoundError if it is missing.
    """
    return _open(path, os.O_DIRECTORY, None, may_trust)[0]


def open_file(
    name: str, dirfd: int, may_trust: Callable[[os.stat_result], bool]
) -> tuple[int, os.stat_result] | None:
    """Return a descriptor and the status of the regular file *name* in the directory *dirfd*.

    Returns None for a directory. Raises CdiError for any other type, and if it is not trusted.
    """
    fd, status = _open(name, 0, dirfd, may_trust)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return fd, status
    os.close(fd)
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise CdiError("syntax", "not a regular file")
    raise CdiError("untrusted", f"the file has {status.st_nlink} names (hard links)")


def _open(
    name: str, flags: int, dirfd: int | None, may_trust: Callable[[os.stat_result], bool]
) -> tuple[int, os.stat_result]:
    """Return *name*, opened, and its status; raise CdiError if it cannot be opened or trusted.

    A symlink, and the path of a directory, is followed if only trusted users can change where it
    leads.
    """
    # O_NONBLOCK: a FIFO in its place must not hang every container start of the node.
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if dirfd is None:
            name = _resolved(os.path.abspath(name), may_trust)
        elif stat.S_ISLNK(os.lstat(name, dir_fd=dirfd).st_mode):
            # The descriptor's current path, because the directory may have been renamed.
            place = os.readlink(f"/proc/self/fd/{dirfd}")
            name, dirfd = _resolved(f"{place}/{name}", may_trust), None
        fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=dirfd)
    except OSError as error:
        raise CdiError("syntax", f"open: {error.strerror}") from error
    status = os.fstat(fd)
    if not may_trust(status):
        os.close(fd)
        noun = "directory" if flags & os.O_DIRECTORY else "file"
        raise CdiError("untrusted", f"the {noun} can be written by users other than root")
    return fd, status


def _resolved(path: str, may_trust: Callable[[os.stat_result], bool]) -> str:
    """Return the absolute *path* with all symlinks resolved; raise OSError.

    Raises CdiError unless each symlink and each directory on the path is trusted.
    """
    directory, links, problem = "/", 0, ""
    todo = path.split("/")[::-1]
    while todo:
        name = todo.pop()
        if name == "..":
            directory = os.path.dirname(directory)
        if name in ("", ".", ".."):
            continue
        problem = problem or _problem(directory, os.lstat(directory), may_trust)
        place = os.path.join(directory, name)
        status = os.lstat(place)
        if not stat.S_ISLNK(status.st_mode):
            directory = place
            continue
        problem = problem or _problem(place, status, may_trust)
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(place)
        if target.startswith("/"):
            directory = "/"
        todo += target.split("/")[::-1]
    # Only now: a missing file is reported as missing even if its path is not trusted.
    if problem:
        raise CdiError("untrusted", problem)
    return directory


def _problem(
    path: str, status: os.stat_result, may_trust: Callable[[os.stat_result], bool]
) -> str:
    """Return why *path*, a directory or a symlink, is not trusted, "" if it is."""
    mode, *rest = status
    # In a sticky directory, others cannot replace root's files. A symlink has no mode of its own.
    if stat.S_ISLNK(mode) or mode & stat.S_ISVTX:
        mode &= ~(stat.S_IWGRP | stat.S_IWOTH)
    if status.st_gid in (0, os.getegid()):
        # Root's group, or a user's own group with a umask of 002.
        mode &= ~stat.S_IWGRP
    if may_trust(os.stat_result((mode, *rest))):
        return ""
    return f'it is reached through "{path}", which users other than root can change'
