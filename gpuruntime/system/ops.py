# SPDX-License-Identifier: Apache-2.0
"""Operations below a container's root: records that describe themselves and can be executed.

On the start path. Whoever plans makes a list of them; whoever executes hands each one the root.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat

from gpuruntime import ldcache
from gpuruntime.errors import LdcacheError, MountError
from gpuruntime.record import Record
from gpuruntime.system import syscalls
from gpuruntime.system.paths import Root, read_regular, replace_file, replace_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

DROP_IN = "00-gpuruntime.conf"
DROP_IN_HEAD = b"# Written at container start: where the GPU driver's libraries are.\n"
LDCONFIG_INCLUDE = b"include /etc/ld.so.conf.d/*.conf\n"
MAX_CONF_BYTES = 1 << 20
MAX_CACHE_BYTES = 8 << 20
PARAMS = "/proc/driver/nvidia/params"
MAX_PARAMS_BYTES = 64 << 10
_MODIFIED, _MASKED = b"ModifyDeviceFiles: 1", b"ModifyDeviceFiles: 0"
# Whoever wants a library from there opens it by its path.
_PLUGIN_DIRECTORIES = ("vdpau",)
# What glibc's loader searches without any cache.
_DEFAULT_DIRECTORIES = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")


class Link(Record):
    """Make *path* a link to *target*, in place of a link or file that is there."""

    __slots__ = ("path", "target")

    def __init__(self, path: str, target: str) -> None:
        self.path = path
        self.target = target

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"link {self.path} -> {self.target}"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*; raise MountError."""
        del warn
        directory, name = posixpath.split(self.path)
        try:
            dirfd = root.open_directory(directory, create=True)
            try:
                replace_link(dirfd, name, self.target)
            finally:
                os.close(dirfd)
        except OSError as error:
            raise MountError(
                f'cannot link "{self.path}" to "{self.target}" in the container: {error.strerror}',
                "use runc, or a root that is not read-only"
                if error.errno == errno.EROFS
                else f'let "{directory}" be a directory of the image, without read-only mounts',
            ) from error


class DeviceLink(Link):
    """A link to a device node, for the containers that have the node."""

    __slots__ = ()

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root* if there is what it leads to; raise MountError."""
        if _exists(root, f"{posixpath.dirname(self.path)}/{self.target}"):
            super().execute(root, warn)


class LoaderCache(Record):
    """Let the container's loader find *entries*, now and after its own ldconfig has run."""

    __slots__ = ("entries",)

    def __init__(self, entries: tuple[ldcache.Entry, ...]) -> None:
        self.entries = entries

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"add {len(self.entries)} libraries to /etc/ld.so.cache"

    def directories(self) -> list[str]:
        """Return the directories of the libraries, each once."""
        return list(dict.fromkeys(posixpath.dirname(entry.path) for entry in self.entries))

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*.

        Raises LdcacheError if that fails and the loader would not find the libraries anyway.
        """
        old, what = None, "/etc/ld.so.cache"
        try:
            etc = root.open_directory("/etc", create=True)
            try:
                old = _read_cache(root)
                new = ldcache.merge(old, self.entries)
                if new != old:
                    replace_file(etc, "ld.so.cache", new, 0o644)
                what = "/etc/ld.so.conf.d"
                self._write_drop_in(root, etc, old, warn)
            finally:
                os.close(etc)
        except (OSError, LdcacheError) as error:
            why = error.message if isinstance(error, LdcacheError) else str(error)
            hidden = self._not_found_without(root, old)
            if hidden:
                raise LdcacheError(
                    f'cannot write "{what}" in the container: {why}; '
                    f'its loader would not find "{hidden[0]}"',
                    'let "/etc" hold plain files, and mount nothing read-only over it',
                ) from error
            warn(f'"{what}" in the container stays as it is: {why}')

    def _not_found_without(self, root: Root, image: bytes | None) -> list[str]:
        """Return the libraries that the loader finds neither by itself nor in *image*, a cache."""
        try:
            cached = {row[:3] for row in ldcache.parse(image)} if image else set()
        except LdcacheError:
            cached = set()
        return [
            entry.path
            for entry in self.entries
            if (entry.soname, entry.path, entry.flags) not in cached
            and posixpath.basename(posixpath.dirname(entry.path)) not in _PLUGIN_DIRECTORIES
            and not _is_searched(root, posixpath.dirname(entry.path))
        ]

    def _write_drop_in(
        self, root: Root, etc: int, image: bytes | None, warn: Callable[[str], None]
    ) -> None:
        """Name for ldconfig the directories that it does not scan, if there is an ldconfig."""
        # One that it scans already must not be named: it would come before the image's others.
        names = [d for d in self.directories() if not _is_scanned(root, image, d)]
        if not names:
            return
        if not _exists(root, "/etc/ld.so.conf"):
            if not (_exists(root, "/sbin/ldconfig") or _exists(root, "/usr/sbin/ldconfig")):
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open("ld.so.conf", flags, 0o644, dir_fd=etc)
            try:
                os.write(fd, LDCONFIG_INCLUDE)
            finally:
                os.close(fd)
        elif not _includes_drop_ins(root):
            warn(
                '"/etc/ld.so.conf" in the container does not include "/etc/ld.so.conf.d": '
                "after its own ldconfig has run, the driver is not found"
            )
        content = DROP_IN_HEAD + b"".join(os.fsencode(name) + b"\n" for name in names)
        dirfd = root.open_directory("/etc/ld.so.conf.d", create=True)
        try:
            if _content(dirfd, DROP_IN) != content:
                replace_file(dirfd, DROP_IN, content, 0o644)
        finally:
            os.close(dirfd)


class MaskParams(Record):
    """Hide from the container that the driver may make device nodes.

    Its libraries would make nodes of GPUs that the container does not have.
    """

    __slots__ = ()

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"mount over {PARAMS} with ModifyDeviceFiles: 0"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*; nothing to do where the host does not modify. MountError."""
        del warn
        try:
            content = _masked_params()
            if content is not None:
                _mount_over_params(root, content)
        except OSError as error:
            raise MountError(
                f'cannot mask "{PARAMS}" in the container: {error}',
                "use a kernel of 5.12 or later, or load the driver with NVreg_ModifyDeviceFiles=0",
            ) from error


def _masked_params() -> bytes | None:
    """Return the host's params with the line changed, or None if there is nothing to change."""
    try:
        fd = os.open(PARAMS, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # One read gives a file of /proc whole.
        lines = os.read(fd, MAX_PARAMS_BYTES).splitlines()
    finally:
        os.close(fd)
    if _MODIFIED not in lines:
        return None
    return b"".join((_MASKED if line == _MODIFIED else line) + b"\n" for line in lines)


def _mount_over_params(root: Root, content: bytes) -> None:
    directory, name = posixpath.split(PARAMS)
    try:
        target_directory = root.open_path(directory)
    except OSError as error:
        # A container without the driver's /proc has nothing to be masked.
        if error.errno == errno.ENOENT:
            return
        raise
    try:
        _stop_propagation(root)
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(name, flags, dir_fd=target_directory)
        try:
            mounted = _file_mount(target_directory, content)
            try:
                syscalls.move_mount(mounted, target)
            finally:
                os.close(mounted)
        finally:
            os.close(target)
    finally:
        os.close(target_directory)


def _stop_propagation(root: Root) -> None:
    """Keep what is mounted below the container's /proc/driver/nvidia from reaching the host.

    Where the container shares mounts with the host (`rshared`), ours would appear there and stay.
    As a slave the mount still receives.
    """
    path = posixpath.dirname(PARAMS)
    while path != "/":
        fd = root.open_path(path)
        try:
            syscalls.mount_setattr(fd, 0, syscalls.MS_SLAVE)
        except syscalls.SyscallError as error:
            # Not the root of a mount: the one that this directory is in begins further up.
            if error.errno != errno.EINVAL:
                raise
        else:
            return
        finally:
            os.close(fd)
        path = posixpath.dirname(path)


def _file_mount(place: int, content: bytes) -> int:
    """Return a detached, read-only mount of a file with *content* on a tmpfs of its own.

    Before Linux 6.15 a file can be cloned only from a mount that is attached: the tmpfs is, on the
    directory *place*, for that moment.
    """
    attributes = (
        syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOEXEC
    )
    tmpfs = syscalls.new_tmpfs(MAX_PARAMS_BYTES, attributes)
    try:
        create = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open("params", create, 0o444, dir_fd=tmpfs)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)
        syscalls.mount_setattr(tmpfs, attributes)
        syscalls.move_mount(tmpfs, place)
        try:
            clone = syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC
            mounted = syscalls.open_tree(tmpfs, "params", clone)
        finally:
            syscalls.umount_detached(tmpfs)
    finally:
        os.close(tmpfs)
    syscalls.mount_setattr(mounted, attributes | syscalls.MOUNT_ATTR_RDONLY)
    return mounted


def _read_cache(root: Root) -> bytes | None:
    try:
        fd = root.open_path("/etc/ld.so.cache")
    except OSError as error:
        # A link that leads nowhere inside the container counts as none, and is replaced.
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            return None
        raise
    try:
        return read_regular(fd, "/etc/ld.so.cache", MAX_CACHE_BYTES)
    finally:
        os.close(fd)


def _content(dirfd: int, name: str) -> bytes | None:
    """Return what the regular file *name* holds, None if it is none."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd)
    except OSError:
        return None
    try:
        return read_regular(fd, name, MAX_CONF_BYTES)
    except OSError:
        return None
    finally:
        os.close(fd)


def _exists(root: Root, path: str) -> bool:
    try:
        os.close(root.open_path(path))
    except OSError:
        return False
    return True


def _is_scanned(root: Root, image: bytes | None, directory: str) -> bool:
    """Tell whether the image's ldconfig scans *directory*, under this name or another."""
    return directory in _DEFAULT_DIRECTORIES or any(
        ldcache.lists_directory(image, name) for name in _names_of(root, directory)
    )


def _is_searched(root: Root, directory: str) -> bool:
    """Tell whether the image's loader searches *directory* without any cache."""
    # Its default directories depend on how it was built: it finds libc.so.6 in one of them, and
    # where /lib is no link to /usr/lib, in the twin of the other.
    twin = directory[len("/usr") :] if directory.startswith("/usr/lib") else f"/usr{directory}"
    return any(_exists(root, f"{name}/libc.so.6") for name in (directory, twin))


def _includes_drop_ins(root: Root) -> bool:
    """Tell whether the image's ld.so.conf includes the directory of our drop-in."""
    lines = root.read_file("/etc/ld.so.conf", MAX_CONF_BYTES).splitlines()
    return any(line.lstrip().startswith(b"include") and b"ld.so.conf.d" in line for line in lines)


def _names_of(root: Root, directory: str) -> list[str]:
    """Return *directory* and, where /lib is a link to usr/lib, its other name."""
    names = [directory]
    if directory.startswith("/usr/lib"):
        other = directory[len("/usr") :]
        if _is_same_directory(root, directory, other):
            names.append(other)
    return names


def _is_same_directory(root: Root, one: str, other: str) -> bool:
    found = []
    for path in (one, other):
        try:
            fd = root.open_path(path)
        except OSError:
            return False
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        found.append((stat.S_IFMT(status.st_mode), status.st_dev, status.st_ino))
    return found[0] == found[1]
