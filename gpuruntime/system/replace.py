# SPDX-License-Identifier: Apache-2.0
"""Replace a file or a link in a directory that others may change meanwhile, by its descriptor.

On the start path. What is new is made under a temporary name and renamed, so that the name holds
the old or the new content at any moment. What stood there is never written through.
"""

from __future__ import annotations

import errno
import posix as os
from itertools import islice

from gpuruntime.system.paths import open_to_list
from gpuruntime.system.syscalls import SyscallError, inode_flags

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TRIES = 128
_TEMPORARY = ".gpuruntime."
# A temporary name has this much of the final one: with the prefix and the random part it must fit
# into 255 bytes.
_MAX_STEM_CHARS = 50
# How many names are searched for leftovers of a killed hook.
_MAX_LOOKED_AT = 10_000
# Errors of an attempt under a random name that another process has removed or taken: try again.
_LOST = (errno.EEXIST, errno.ENOENT, errno.EAGAIN)
# Errors of an attempt under the fixed name, where another hook uses it at the same time, a
# directory has it, or it is too long: use a random name instead.
_TAKEN = (
    *(errno.EEXIST, errno.ENOENT, errno.EISDIR, errno.EPERM, errno.EAGAIN, errno.ENAMETOOLONG),
)
_O_PATH = os.O_PATH | os.O_CLOEXEC
_APPEND_ONLY = 0x20


def _require_removable(dirfd: int) -> None:
    """Raise OSError where a new name could be neither renamed nor taken away again."""
    try:
        flags = inode_flags(dirfd)
    except OSError:
        # A file system without such flags.
        return
    if flags & _APPEND_ONLY:
        raise SyscallError(errno.EPERM, "a new name in a directory that is append-only")


def replace_file(dirfd: int, name: str, data: bytes, mode: int) -> None:
    """Put a new file *name* with *data* into *dirfd*: created under another name, then renamed.

    What stands there, link or file, is replaced and never written through. Nobody else uses that
    other name, or the half of a file could be put in place; what a hook that was killed has left,
    the next one takes away. Raises OSError, with nothing left behind.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

    def put(temporary: str) -> int:
        return os.open(temporary, flags, 0o600, dir_fd=dirfd)

    def fill(fd: int) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        # Without fsync: it waits for the disk, which a neighbour can keep busy for longer than the
        # hook's deadline. After a power cut the file may be empty: system/loader.py warns of that.
        os.fchmod(fd, mode)

    _require_removable(dirfd)
    stem = f"{_TEMPORARY}{name[:_MAX_STEM_CHARS]}"
    _remove_leftovers(dirfd, stem)
    for _ in range(MAX_TRIES):
        try:
            _put_and_rename(dirfd, f"{stem}.{os.urandom(8).hex()}", name, put, fill)
        except OSError as error:
            # Another hook took it for a leftover.
            if error.errno not in _LOST:
                raise
            lost = error
        else:
            return
    raise lost


def _remove_leftovers(dirfd: int, stem: str) -> None:
    """Take the temporary names of *stem* out of *dirfd*, as far as that can be."""
    with os.scandir(dirfd) as entries:
        names = [entry.name for entry in islice(entries, _MAX_LOOKED_AT)]
    for name in names:
        if name == stem or name.startswith(f"{stem}."):
            try:
                os.unlink(name, dir_fd=dirfd)
            except OSError:
                # A directory, or another hook was first: ours has a name of its own.
                pass


def replace_link(dirfd: int, name: str, target: str) -> bool:
    """Make *name* in *dirfd* a link to *target*, atomically; return whether that was needed.

    A directory in the way raises OSError, with nothing left behind, and stays.
    """
    try:
        # A link is whole from the first: where nothing has the name, it needs no other.
        os.symlink(target, name, dir_fd=dirfd)
    except FileExistsError:
        pass
    else:
        return True
    try:
        if os.readlink(name, dir_fd=dirfd) == target:
            return False
    except OSError as error:
        # Gone by now, or no link.
        if error.errno not in (errno.ENOENT, errno.EINVAL):
            raise
    listed = open_to_list(dirfd)
    try:
        _require_removable(listed)
    finally:
        os.close(listed)
    _exchange_link(dirfd, name, target)
    return True


def _exchange_link(dirfd: int, name: str, target: str) -> None:
    """Put a link to *target* in place of what has the *name* in *dirfd*; raise OSError."""

    def put(temporary: str) -> int:
        os.symlink(target, temporary, dir_fd=dirfd)
        return os.open(temporary, _O_PATH | os.O_NOFOLLOW, dir_fd=dirfd)

    def check(fd: int) -> None:
        if os.readlink("", dir_fd=fd) != target:
            raise SyscallError(errno.EAGAIN, f'symlink("{name}"), which somebody exchanged')

    # Its other name can be the same each time: what a hook that was killed has left there, the
    # next one takes away. Where another hook is at it, or a directory has the name, it is random.
    temporary = f"{_TEMPORARY}{name}"
    try:
        remove_name(dirfd, temporary)
        _put_and_rename(dirfd, temporary, name, put, check)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        _put_and_rename(dirfd, f"{_TEMPORARY}{os.urandom(8).hex()}", name, put, check)


def _put_and_rename(
    dirfd: int,
    temporary: str,
    name: str,
    put: Callable[[str], int],
    finish: Callable[[int], None],
) -> None:
    """Put something at *temporary*, finish it by its descriptor, and rename it to *name*."""
    try:
        fd = put(temporary)
        try:
            finish(fd)
            _require_same(dirfd, temporary, fd)
            os.rename(temporary, name, src_dir_fd=dirfd, dst_dir_fd=dirfd)
        finally:
            # Not before: another file could have its number.
            os.close(fd)
    except FileExistsError:
        # Not ours.
        raise
    except BaseException:
        remove_name(dirfd, temporary)
        raise


def _require_same(dirfd: int, name: str, fd: int) -> None:
    ours = _identity(os.fstat(fd))
    if ours != _identity(os.stat(name, dir_fd=dirfd, follow_symlinks=False)):
        raise SyscallError(errno.EAGAIN, f'rename("{name}"), which somebody exchanged')


def remove_name(dirfd: int, name: str) -> None:
    """Take *name* out of *dirfd*, where somebody else may be at it; raise OSError."""
    try:
        os.unlink(name, dir_fd=dirfd)
    except FileNotFoundError:
        pass


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
