# SPDX-License-Identifier: Apache-2.0
"""Mount a read-only file over a file of a container, by descriptors.

On the start path. The mount is private, and nobody can write to it at any moment. Kernels before
5.12 have only mount(2); there the descriptors are named by /proc/self/fd.
"""

from __future__ import annotations

import errno
import posix as os

from cdi.pathnames import split
from gpuruntime.system import syscalls
from gpuruntime.system.paths import mount_id
from gpuruntime.system.syscalls import SyscallError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuruntime.system.paths import Root

_PAGE_BYTES = 64 << 10
_FILE = "file"
_ATTRIBUTES = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOEXEC
# Of these each mount has its own files. What is in /proc or /sys is the host's, wherever it is.
_WITH_OWN_FILES = ("tmpfs", "ramfs")
_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC


def cover(root: Root, path: str, content: bytes, mode: int) -> bool:
    """Mount a file with *content* on the name *path* of the container, whatever file has it.

    False if there is none that has it. Raises OSError, also for a root that is no mount, in one
    that is shared: then it would be a mount of the host's that has to stop sharing.
    """
    directory, name = split(path)
    try:
        place = root.open_path(directory)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    try:
        try:
            target = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        except FileNotFoundError:
            return False
        try:
            _require_own_mount(root, path)
            _cover((place, target), (content, mode))
        except SyscallError as error:
            if error.errno != errno.ENOSYS:
                raise
            file = _cover_by_path(root, directory, (place, target), (content, mode))
            _require_same(root, path, file)
        finally:
            os.close(target)
    finally:
        os.close(place)
    return True


def is_mount(fd: int) -> bool:
    """Return whether the directory *fd* is the root of a mount."""
    above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        return mount_id(above) != mount_id(fd)
    finally:
        os.close(above)


def _require_own_mount(root: Root, path: str) -> None:
    if not is_mount(root.fd) and _is_shared(root.fd):
        raise SyscallError(errno.EINVAL, f'mount on "{path}" in a root that is not a mount')


def _is_shared(fd: int) -> bool:
    """Return whether what is mounted in the mount of *fd* appears in others."""
    return " shared:" in _line_of(fd).partition(" - ")[0]


def is_of_host(root: Root, fd: int) -> bool:
    """Return whether *fd* is on a mount below *root* whose files the host may have as well.

    As a volume, `/dev` of the host or `/sys`: whose they are is not for the container to say.
    """
    mount = mount_id(fd)
    if mount == root.mount_id():
        return False
    below = f"{_place_of(root)}/"
    mounts = _listed()
    devices = {
        device
        for number, device, _, kind in mounts
        if number == str(mount) and kind in _WITH_OWN_FILES
    }
    elsewhere = {device for _, device, point, _ in mounts if not point.startswith(below)}
    return not devices or bool(devices & elsewhere)


def _listed() -> list[tuple[str, str, str, str]]:
    """Return number, device, place and kind of each mount of this process; proc(5), mountinfo."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        fields = [(line.split(" ", 5), line.rpartition(" - ")[2]) for line in lines]
    return [(f[0], f[2], f[4], behind.partition(" ")[0]) for f, behind in fields]


def _place_of(root: Root) -> str:
    """Return where *root* is, as the kernel writes it in mountinfo."""
    # readlinkat(2): without a directory, Python makes another call, which a hook may not.
    path = os.readlink(f"/proc/self/fd/{root.fd}", dir_fd=root.fd)
    for character in "\\ \t\n":
        path = path.replace(character, f"\\{ord(character):03o}")
    return path


def count_on(root: Root) -> int:
    """Return how many mounts this process has on the directory of *root*."""
    place = _place_of(root)
    return sum(point == place for _, _, point, _ in _listed())


def _cover(fds: tuple[int, int], file: tuple[bytes, int]) -> None:
    place, target = fds
    _stop_both(place, target, _make_slave)
    mounted = _file_mount(place, *file)
    try:
        syscalls.move_mount(mounted, target)
    finally:
        os.close(mounted)


def stop_propagation(place: int, target: int) -> None:
    """Keep what is mounted on *target*, in the directory *place*, from reaching the host.

    Where the container shares mounts with the host (`rshared`), ours would appear there and stay.
    As a slave the mount still receives. By descriptors: the place can be another by now than the
    one that its path leads to. Raises OSError, with ENOSYS before Linux 5.12.
    """
    if not _make_slave(target):
        _stop_above(place, _make_slave)


def _stop_both(place: int, target: int, make_slave: Callable[[int], bool]) -> None:
    """As `stop_propagation`, where something is mounted on the directory *place* as well."""
    make_slave(target)
    _stop_above(place, make_slave)


def _stop_above(place: int, make_slave: Callable[[int], bool]) -> None:
    """Make the mount that the directory *place* is in a slave."""
    fd = os.dup(place)
    try:
        # At the latest, the container's root is the root of a mount.
        while not make_slave(fd):
            above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = above
    finally:
        os.close(fd)


def _make_slave(fd: int) -> bool:
    """Make the mount of which *fd* is the root a slave; return whether it is the root of one."""
    try:
        syscalls.mount_setattr(fd, 0, syscalls.MS_SLAVE)
    except SyscallError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _make_slave_by_path(fd: int) -> bool:
    """Do with mount(2) what `_make_slave` does."""
    try:
        syscalls.mount("", fd, "", syscalls.MS_SLAVE)
    except SyscallError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _file_mount(place: int, content: bytes, mode: int) -> int:
    """Return a detached, read-only mount of a file with *content* on a tmpfs of its own.

    Before Linux 6.15 a file can be cloned only from a mount that is attached: the tmpfs is, on the
    directory *place*, for that moment.
    """
    tmpfs = syscalls.new_tmpfs(_size(content), _ATTRIBUTES)
    try:
        _write(tmpfs, content, mode)
        syscalls.mount_setattr(tmpfs, _ATTRIBUTES)
        syscalls.move_mount(tmpfs, place)
        try:
            mounted = syscalls.open_tree(tmpfs, _FILE, syscalls.OPEN_TREE_CLONE)
        finally:
            syscalls.umount_detached(tmpfs)
    finally:
        os.close(tmpfs)
    syscalls.mount_setattr(mounted, _ATTRIBUTES | syscalls.MOUNT_ATTR_RDONLY)
    return mounted


def _cover_by_path(
    root: Root, directory: str, fds: tuple[int, int], file: tuple[bytes, int]
) -> tuple[int, int]:
    """Do with mount(2) what `_cover` does; return device and inode of the file."""
    place, target = fds
    content, mode = file
    _stop_both(place, target, _make_slave_by_path)
    source = f"gpuruntime-{os.urandom(8).hex()}"
    syscalls.mount(source, place, "tmpfs", _FLAGS, f"size={_size(content)},mode=0755")
    tmpfs = root.open_directory(directory)
    try:
        # The name may lead elsewhere by now, and then what is there is not ours.
        if _source_of(tmpfs) != source:
            raise SyscallError(errno.EAGAIN, f'mount on "{directory}", which somebody exchanged')
        try:
            syscalls.mount("", tmpfs, "", syscalls.MS_PRIVATE)
            _write(tmpfs, content, mode)
            read_only = syscalls.MS_REMOUNT | syscalls.MS_RDONLY
            syscalls.mount("", tmpfs, "", read_only | _FLAGS)
            fd = os.open(_FILE, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tmpfs)
            try:
                syscalls.mount(f"/proc/self/fd/{fd}", target, "", syscalls.MS_BIND)
                status = os.fstat(fd)
            finally:
                os.close(fd)
        finally:
            syscalls.umount_detached(tmpfs)
    finally:
        os.close(tmpfs)
    return status.st_dev, status.st_ino


def _require_same(root: Root, path: str, file: tuple[int, int]) -> None:
    """Raise OSError if *path* leads to anything but *file*: somebody has moved what we covered."""
    fd = root.open_path(path)
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if (status.st_dev, status.st_ino) != file:
        raise SyscallError(errno.EAGAIN, f'mount on "{path}", which somebody exchanged')


def _source_of(fd: int) -> str:
    """Return the source of the mount that *fd* is in, as the kernel lists it."""
    return "".join(_line_of(fd).rpartition(" - ")[2].split(" ")[1:2])


def _line_of(fd: int) -> str:
    """Return what the kernel lists of the mount that *fd* is in; proc(5), mountinfo."""
    start = f"{mount_id(fd)} "
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return next((line for line in lines if line.startswith(start)), "")


def _size(content: bytes) -> int:
    """Return how large a tmpfs must be: whole pages, of the largest that there are."""
    return (len(content) // _PAGE_BYTES + 1) * _PAGE_BYTES


def _write(dirfd: int, content: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_FILE, flags, mode, dir_fd=dirfd)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fchmod(fd, mode)
    finally:
        os.close(fd)
