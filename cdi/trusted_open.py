# SPDX-License-Identifier: Apache-2.0
"""Open spec directories and spec files whose ownership, and that of the way to them, is trusted.

On the start path. *may_trust* decides over the ownership of what is opened, and of each link and
directory on the way.
"""

from __future__ import annotations

import errno
import os
import stat

from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# As the kernel has it: path_resolution(7).
_MAX_LINKS = 40


def open_directory(path: str, may_trust: Callable[[os.stat_result], bool]) -> int:
    """Return a descriptor of the directory *path*; raise CdiError if it is missing or in doubt.

    The cause of the CdiError is a FileNotFoundError if it is missing.
    """
    return _open(path, os.O_DIRECTORY, None, may_trust)[0]


def open_file(
    name: str, dirfd: int, may_trust: Callable[[os.stat_result], bool]
) -> tuple[int, os.stat_result] | None:
    """Return a descriptor and the status of the regular file *name* in the directory *dirfd*.

    None for a directory. Raises CdiError for anything else, and if the file is in doubt.
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

    A link is followed if none but those we trust can have a say in where it leads, and so is the
    path of a directory.
    """
    # O_NONBLOCK: a FIFO planted here must not hang every container start of the node.
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if dirfd is None:
            name = _resolved(os.path.abspath(name), may_trust)
        elif stat.S_ISLNK(os.lstat(name, dir_fd=dirfd).st_mode):
            # The descriptor's own name, since dirfd may not be the directory of that path now.
            place = os.readlink(f"/proc/self/fd/{dirfd}")
            name, dirfd = _resolved(f"{place}/{name}", may_trust), None
        fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=dirfd)
    except OSError as error:
        raise CdiError("syntax", f"open: {error.strerror}") from error
    status = os.fstat(fd)
    if not may_trust(status):
        os.close(fd)
        what = "directory" if flags & os.O_DIRECTORY else "file"
        raise CdiError("untrusted", f"the {what} is not root's alone to write")
    return fd, status


def _resolved(path: str, may_trust: Callable[[os.stat_result], bool]) -> str:
    """Return the absolute *path* without links in it; raise OSError.

    Raises CdiError unless each link and each directory on the way is trusted.
    """
    here, links, problem = "/", 0, ""
    todo = path.split("/")[::-1]
    while todo:
        name = todo.pop()
        if name == "..":
            here = os.path.dirname(here)
        if name in ("", ".", ".."):
            continue
        problem = problem or _problem(here, os.lstat(here), may_trust)
        place = os.path.join(here, name)
        status = os.lstat(place)
        if not stat.S_ISLNK(status.st_mode):
            here = place
            continue
        problem = problem or _problem(place, status, may_trust)
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(place)
        if target.startswith("/"):
            here = "/"
        todo += target.split("/")[::-1]
    # Not before: what is missing is missing, whoever may make it.
    if problem:
        raise CdiError("untrusted", problem)
    return here


def _problem(
    path: str, status: os.stat_result, may_trust: Callable[[os.stat_result], bool]
) -> str:
    """Return why the way through *path*, a directory or a link, is in doubt, "" if it is not."""
    mode, *others = status
    # In a sticky directory, others cannot replace what is root's. A link has no mode of its own.
    if stat.S_ISLNK(mode) or mode & stat.S_ISVTX:
        mode &= ~(stat.S_IWGRP | stat.S_IWOTH)
    if status.st_gid in (0, os.getegid()):
        # Root's group, or a user's own where the umask is 002.
        mode &= ~stat.S_IWGRP
    if may_trust(os.stat_result((mode, *others))):
        return ""
    return f'it is reached through "{path}", which is not root\'s alone to change'
