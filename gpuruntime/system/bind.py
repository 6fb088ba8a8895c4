# SPDX-License-Identifier: Apache-2.0
"""Mount a file of the host into a container's root.

On the start path, for the prestart hook alone: everywhere else the low-level runtime mounts. Needs
Linux 5.12, where a mount can be made and changed before anybody can see it.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat

from gpuruntime.errors import MountError
from gpuruntime.system import syscalls
from gpuruntime.system.mounts import stop_propagation
from gpuruntime.system.operation import Operation
from gpuruntime.system.paths import MAX_LINKS
from gpuruntime.system.syscalls import SyscallError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpuruntime.system.paths import Root

_ATTRIBUTES = {
    "ro": syscalls.MOUNT_ATTR_RDONLY,
    "nosuid": syscalls.MOUNT_ATTR_NOSUID,
    "nodev": syscalls.MOUNT_ATTR_NODEV,
    "noexec": syscalls.MOUNT_ATTR_NOEXEC,
}
_O_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# What is at the path, or a link there that leads to nothing.
_IN_THE_WAY = (errno.EISDIR, errno.ELOOP, errno.ENOENT)


class BindMount(Operation):
    """Mount *host_path*, which is trusted, on *path* of the container, as *options* say."""

    __slots__ = ("host_path", "options", "path")

    def __init__(self, host_path: str, path: str, options: Collection[str]) -> None:
        self.host_path = host_path
        self.path = path
        self.options = tuple(options)

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"mount {self.host_path} on {self.path}"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*, where it is not there already; raise MountError."""
        del warn
        hint = f'let "{posixpath.dirname(self.path)}" be a directory of the image'
        try:
            tree = self._clone()
            try:
                self._mount(root, tree)
            finally:
                os.close(tree)
        except OSError as error:
            if not os.path.lexists(self.host_path):
                hint = f'check that "{self.host_path}" is there on the host'
            elif error.errno == errno.ENOSYS:
                hint = "use a kernel of 5.12 or later"
            elif error.errno == errno.EXDEV:
                hint = f'mount the volume at "{posixpath.dirname(self.path)}" itself'
            elif error.errno == errno.EROFS:
                hint = "use runc, or a root that is not read-only"
            elif error.errno in _IN_THE_WAY:
                hint = f'take "{self.path}" out of the image'
            raise MountError(
                f'cannot mount "{self.host_path}" on "{self.path}" in the container: '
                f"{error.strerror or error}",
                hint,
            ) from error

    def _clone(self) -> int:
        """Return a detached mount of the host's file, which is as it is to be in the container."""
        attributes = 0
        for option in self.options:
            attributes |= _ATTRIBUTES.get(option, 0)
        tree_too = syscalls.AT_RECURSIVE if "rbind" in self.options else 0
        clone = syscalls.OPEN_TREE_CLONE | tree_too
        tree = syscalls.open_tree(syscalls.AT_FDCWD, self.host_path, clone)
        try:
            flags = syscalls.AT_EMPTY_PATH | tree_too
            syscalls.mount_setattr(tree, attributes, syscalls.MS_PRIVATE, flags)
        except BaseException:
            os.close(tree)
            raise
        return tree

    def _mount(self, root: Root, tree: int) -> None:
        status = os.fstat(tree)
        make = _make_directory if stat.S_ISDIR(status.st_mode) else _make_file
        place, target = _open_target(root, self.path, make)
        try:
            there = os.fstat(target)
            if stat.S_ISDIR(there.st_mode) != stat.S_ISDIR(status.st_mode):
                code = errno.EISDIR if stat.S_ISDIR(there.st_mode) else errno.ENOTDIR
                raise SyscallError(code, f'move_mount("{self.path}")')
            if (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino):
                # Another hook has been here before, or a volume has it.
                return
            stop_propagation(place, target)
            syscalls.move_mount(tree, target)
        finally:
            os.close(target)
            os.close(place)


def _open_target(root: Root, path: str, make: Callable[[int, str], None]) -> tuple[int, int]:
    """Return descriptors of what to mount on, which is no link, and of the directory it is in.

    Made with *make* if it is missing. A link is followed inside the root, and then it counts what
    that directory has by its name; another link is followed in turn.
    """
    asked = posixpath.dirname(path)
    for _ in range(MAX_LINKS):
        directory, name = posixpath.split(path)
        place = _open_directory(root, directory)
        try:
            try:
                # The image's own, or of a container that was started before.
                target = os.open(name, _O_NAME, dir_fd=place)
            except FileNotFoundError:
                root.require_own(asked, place)
                try:
                    make(place, name)
                except FileExistsError:
                    # Another hook on the same root was first.
                    pass
                target = os.open(name, _O_NAME, dir_fd=place)
        except BaseException:
            os.close(place)
            raise
        if not stat.S_ISLNK(os.fstat(target).st_mode):
            return place, target
        os.close(target)
        os.close(place)
        found, path = root.resolve(path)
        os.close(found)
    raise SyscallError(errno.ELOOP, f'open("{path}")')


def _open_directory(root: Root, path: str) -> int:
    try:
        # To mount on what is there is to write nothing.
        return root.open_directory(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
    return root.open_directory(path, create=True)


def _make_file(place: int, name: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(name, flags, 0o644, dir_fd=place))


def _make_directory(place: int, name: str) -> None:
    os.mkdir(name, 0o755, dir_fd=place)
