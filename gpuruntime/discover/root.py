# SPDX-License-Identifier: Apache-2.0
"""Files below a driver root: located, checked and read at most once each.

Every path is resolved inside the root, whose symlinks may be absolute. The file that a path
resolves to is recorded, if only its owner can change it. A root is read once: make another object
to see changes.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
import sys

from gpuruntime import remedies
from gpuruntime.errors import DiscoveryError
from gpuruntime.formats import elf
from gpuruntime.record import Record
from gpuruntime.system.paths import Root, read_regular, reopen
from gpuruntime.trusted_files import may_trust, may_trust_entries

# The audit event of each path that is looked up below a driver root; see sys.audit.
LOOK = "gpuruntime.look"
# Paths without characters that are special in a CDI spec or in a hook's arguments.
_CLEAN = re.compile(r"(?:/[A-Za-z0-9_.+~@-]+)+\Z")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_clean_host_path(path: str) -> bool:
    """Return whether *path* is absolute and has no character with a special meaning."""
    return _CLEAN.match(path) is not None and not {".", ".."} & set(path.split("/"))


def normal(path: str) -> str:
    """Return the absolute *path* without empty parts, `.` and `..`."""
    return "/" + posixpath.normpath(path).lstrip("/")


def _read_elf(fd: int) -> elf.Elf:
    """Return the ELF data of the file *fd* (O_PATH); raise ElfError, OSError."""
    file = reopen(fd, os.O_RDONLY)
    try:
        return elf.read(lambda offset, length: os.pread(file, length, offset))
    finally:
        os.close(file)


class Directory(Record):
    """A directory of *root*: its own *path* below it, and the *names* in it."""

    __slots__ = ("names", "path", "root")

    def __init__(self, root: DriverRoot, path: str, names: frozenset[str]) -> None:
        self.root = root
        self.path = path
        self.names = names

    def join(self, name: str) -> str:
        """Return the path of *name* in this directory."""
        return f"/{name}" if self.path == "/" else f"{self.path}/{name}"


class DriverRoot:
    """A driver root: its host path, and the `Root` that resolves paths below it."""

    def __init__(self, path: str) -> None:
        """Open *path*; raise DiscoveryError if it is not a directory, or is another user's."""
        hint = (
            'name the directory where the driver is installed with "--driver-root", or as '
            '"nvidia-container-cli.root" in config.toml'
        )
        try:
            self.path = os.path.realpath(path)
            if not self.path.isprintable():
                raise DiscoveryError(f'the driver root "{path}" cannot be named in a spec', hint)
            self.root = Root(self.path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DiscoveryError(
                f'cannot open the driver root "{path}": {reason}', hint
            ) from error
        status = os.fstat(self.root.fd)
        if not may_trust(status):
            raise self._changeable("", status)
        # Set by search_paths, which reads it from this root's files.
        self.loader_directories: list[str] | None = None
        self._directories: dict[str, Directory | None] = {}
        self._files: dict[str, str | DiscoveryError | None] = {}
        self._by_place: dict[tuple[int, int], Directory] = {}
        self._elves: dict[str, elf.Elf] = {}
        self._is_safe: dict[str, bool] = {}
        self._host: DriverRoot | None = None

    def __del__(self) -> None:
        """Close the root, because one process may open many."""
        root = getattr(self, "root", None)
        if root is not None:
            root.close()

    @property
    def host(self) -> DriverRoot:
        """The host's own root."""
        if self.path == "/":
            return self
        if self._host is None:
            self._host = DriverRoot("/")
        return self._host

    def around(self, host_path: str) -> tuple[DriverRoot, str]:
        """Return the root to resolve *host_path* in, and the path in that root.

        It is this root if the path is below it, else the host's.
        """
        host_path = normal(os.path.abspath(host_path))
        if self.path != "/" and f"{host_path}/".startswith(f"{self.path}/"):
            return self, host_path[len(self.path) :] or "/"
        return self.host, host_path

    def host_path(self, path: str) -> str:
        """Return the host path of *path* below this root."""
        return path if self.path == "/" else self.path + path

    def directory(self, path: str) -> Directory | None:
        """Return the directory that *path* leads to; None if there is none."""
        if path not in self._directories:
            self._directories[path] = self._read_directory(path)
        return self._directories[path]

    def _read_directory(self, path: str) -> Directory | None:
        sys.audit(LOOK, self.host_path(path))
        try:
            fd = self.root.open_directory(path)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            place = status.st_dev, status.st_ino
            directory = self._by_place.get(place)
            if directory is None:
                directory = Directory(self, self._below(fd), frozenset(os.listdir(fd)))
                self._by_place[place] = directory
                self._is_safe[directory.path] = may_trust_entries(status)
            return directory
        finally:
            os.close(fd)

    def locate(self, path: str) -> str | None:
        """Return the path of the regular file that *path* leads to; None if there is none."""
        try:
            return self.file(path)
        except DiscoveryError:
            return None

    def file(self, path: str) -> str | None:
        """Return the path of the file that *path* leads to, None if it does not exist.

        Raises DiscoveryError, which names the file, unless it is a regular file of this root that
        only its owner can change.
        """
        if path not in self._files:
            try:
                self._files[path] = self._locate(path)
            except DiscoveryError as error:
                self._files[path] = error
        result = self._files[path]
        if isinstance(result, DiscoveryError):
            raise result
        return result

    def _locate(self, path: str) -> str | None:
        fd = self._open(path)
        if fd is None:
            return None
        try:
            return self._checked(fd, path)
        finally:
            os.close(fd)

    def library(self, path: str) -> tuple[str, elf.Elf]:
        """Return the path of the library that *path* leads to, and its ELF data.

        Raises DiscoveryError if the file is missing or is not a library, and as `file` does.
        """
        fd = self._open(path)
        if fd is None:
            raise self._refused(path, "is not there")
        try:
            real = self._checked(fd, path)
            if real not in self._elves:
                self._elves[real] = _read_elf(fd)
        except elf.ElfError as error:
            raise DiscoveryError(
                f'"{self.host_path(path)}" is not a usable library: {error}',
                remedies.REINSTALL_DRIVER,
            ) from error
        except OSError as error:
            raise self._refused(path, f"cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)
        return real, self._elves[real]

    def read(self, path: str, max_bytes: int) -> bytes | None:
        """Return the content of the regular file *path*; None if it cannot be read."""
        sys.audit(LOOK, self.host_path(path))
        try:
            fd = self.root.open_path(path)
        except OSError:
            return None
        try:
            return read_regular(fd, path, max_bytes)
        except OSError:
            return None
        finally:
            os.close(fd)

    def content(self, path: str, max_bytes: int) -> bytes:
        """Return the content of the file *path*, which only its owner can change.

        Raises DiscoveryError, which names the file and the reason, also for a larger file.
        """
        fd = self._open(path)
        if fd is None:
            raise self._refused(path, "does not exist")
        try:
            self._checked(fd, path)
            return read_regular(fd, path, max_bytes)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise self._refused(path, f"cannot be read: {why}") from error
        finally:
            os.close(fd)

    def trusted_directory(self, path: str) -> str:
        """Return the directory that *path* leads to; raise DiscoveryError.

        Only its owner can add files to it.
        """
        directory = self.directory(path)
        if directory is None:
            raise self._refused(path, "is not a directory")
        if not self._is_safe[directory.path]:
            raise self._changeable(directory.path, self._status(directory.path))
        return directory.path

    def link_target(self, path: str) -> str | None:
        """Return the target of the symlink *path* as it is written, None if it is not one."""
        directory, _, name = path.rpartition("/")
        try:
            fd = self.root.open_path(directory)
        except OSError:
            return None
        try:
            return os.readlink(name, dir_fd=fd)
        except OSError:
            return None
        finally:
            os.close(fd)

    def special(self, path: str) -> tuple[str, os.stat_result] | None:
        """Return (path, status) of *path* itself, a socket or directory; None if it is neither.

        A symlink is never followed: in /tmp, any user can create one.
        """
        directory, _, name = path.rpartition("/")
        try:
            parent = self.root.open_path(directory)
        except OSError:
            return None
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError:
            return None
        finally:
            os.close(parent)
        try:
            status = os.fstat(fd)
            real = self._below(fd)
        finally:
            os.close(fd)
        if is_clean_host_path(real) and (
            stat.S_ISSOCK(status.st_mode) or stat.S_ISDIR(status.st_mode)
        ):
            return real, status
        return None

    def is_executable(self, path: str) -> bool:
        """Return whether the file *path* is executable."""
        try:
            return bool(self._status(path).st_mode & 0o111)
        except DiscoveryError:
            return False

    def _open(self, path: str) -> int | None:
        """Return an O_PATH descriptor of the file that *path* leads to; None if it is missing."""
        sys.audit(LOOK, self.host_path(path))
        try:
            return self.root.open_path(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR) and not self.is_link(path):
                return None
            if error.errno == errno.ENOENT:
                raise self._refused(
                    path, "is a symlink whose target does not exist in this root"
                ) from error
            raise self._refused(path, f"cannot be opened: {error.strerror}") from error

    def is_link(self, path: str) -> bool:
        """Return whether *path* itself is a symlink."""
        directory, _, name = path.rpartition("/")
        listed = self._directories.get(directory)
        if listed is not None and name not in listed.names:
            return False
        try:
            fd = self.root.open_path(directory)
        except OSError:
            return False
        try:
            return stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
        except OSError:
            return False
        finally:
            os.close(fd)

    def _checked(self, fd: int, path: str) -> str:
        status = os.fstat(fd)
        kind = stat.S_IFMT(status.st_mode)
        if kind != stat.S_IFREG:
            raise self._refused(
                path, f"is {_KINDS.get(kind, 'a special file')}, not a regular file"
            )
        real = self._below(fd)
        if not is_clean_host_path(real) or status.st_nlink == 0:
            raise self._refused(path, f'leads to "{real}", which cannot be named in a spec')
        if not may_trust(status):
            raise self._changeable(real, status)
        parent = posixpath.dirname(real)
        if parent not in self._is_safe:
            self._is_safe[parent] = may_trust_entries(self._status(parent))
        if not self._is_safe[parent]:
            raise self._changeable(parent, self._status(parent))
        return real

    def _status(self, path: str) -> os.stat_result:
        fd = self._open(path)
        if fd is None:
            raise self._refused(path, "is no longer there")
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _below(self, fd: int) -> str:
        host_path = os.readlink(f"/proc/self/fd/{fd}")
        return host_path if self.path == "/" else host_path[len(self.path) :] or "/"

    def _refused(self, path: str, why: str) -> DiscoveryError:
        return DiscoveryError(f'"{self.host_path(path)}" {why}', remedies.REINSTALL_DRIVER)

    def _changeable(self, path: str, status: os.stat_result) -> DiscoveryError:
        return DiscoveryError(
            f'"{self.host_path(path)}" belongs to uid {status.st_uid}, mode '
            f"{stat.S_IMODE(status.st_mode):04o}: users other than root can change it",
            "install the driver where only root can write",
        )
