# SPDX-License-Identifier: Apache-2.0
"""The host that is examined: this one, or a tree of files of another one; changes nothing.

All checks read through this module, with the root of the tree as `/`, so that no check reads a
file of this machine instead of one in the tree.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpuruntime import config as settings
from gpuruntime.config import Config
from gpuruntime.configfile import check
from gpuruntime.configfile import file as files
from gpuruntime.discover.root import DriverRoot
from gpuruntime.errors import ConfigError, DiscoveryError
from gpuruntime.oci.lowlevel import STANDARD_PATH
from gpuruntime.system.paths import Root, list_names, reopen

MAX_BYTES = 4 << 20
MAX_NAMES = 100_000
PROGRAM_TIMEOUT_S = 5.0
# A text that every version of our launcher contains, and no other program.
_OURS = b"gpuruntime-launcher "
_MAX_PROGRAM_BYTES = 1 << 20
_MAX_OUTPUT_BYTES = 64 << 10
_CHUNK_BYTES = 64 << 10


class ExaminedMachine:
    """The host whose `/` is the directory *root*; *is_live* if it is this machine."""

    def __init__(self, root: str = "/", environ: Mapping[str, str] | None = None) -> None:
        """Open *root*; raise ConfigError if it is not a directory.

        *environ* is the environment of the host, {} for a tree.
        """
        self.root = os.path.realpath(root)
        try:
            self._root = Root(self.root)
        except OSError as error:
            raise ConfigError(
                f'cannot open "{root}": {error.strerror}', "name the root directory of a host"
            ) from error
        self.is_live = self.root == "/"
        self.environ = dict(environ or {})
        self._config: Config | None = None

    def path(self, path: str) -> str:
        """Return the path on this machine of the host's *path*."""
        return path if self.is_live else self.root + path

    def real(self, path: str) -> str:
        """Return *path* with all symlinks resolved, "" if it does not exist."""
        try:
            fd, real = self._root.resolve(path)
        except OSError:
            return ""
        os.close(fd)
        return real

    def read(self, path: str, max_bytes: int = MAX_BYTES) -> str | None:
        """Return the text of the file *path*, None if it cannot be read."""
        data = self.read_bytes(path, max_bytes)
        return None if data is None else data.decode("utf-8", "replace")

    def read_bytes(self, path: str, max_bytes: int = MAX_BYTES) -> bytes | None:
        """Return the bytes of the regular file *path*; None on an error, or if it is larger."""
        try:
            fd = self._root.open_path(path)
        except OSError:
            return None
        try:
            return _content(fd, max_bytes)
        except OSError:
            return None
        finally:
            os.close(fd)

    def open(self, path: str) -> BinaryIO | None:
        """Return the regular file *path*, open for reading; None on an error."""
        try:
            fd = self._root.open_path(path)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            return os.fdopen(reopen(fd, os.O_RDONLY), "rb")
        except OSError:
            return None
        finally:
            os.close(fd)

    def status(self, path: str) -> os.stat_result | None:
        """Return the status of *path*, symlinks followed; None if it does not exist."""
        try:
            fd = self._root.open_path(path)
        except OSError:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def lstatus(self, path: str) -> os.stat_result | None:
        """Return the status of *path*, symlinks not followed; None if it does not exist."""
        parent, name = posixpath.split(path)
        try:
            fd = self._root.open_path(parent)
        except OSError:
            return None
        try:
            return os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return None
        finally:
            os.close(fd)

    def link(self, path: str) -> str | None:
        """Return the target of the symlink *path*, None if it is not one."""
        parent, name = posixpath.split(path)
        try:
            fd = self._root.open_path(parent)
        except OSError:
            return None
        try:
            return os.readlink(name, dir_fd=fd)
        except OSError:
            return None
        finally:
            os.close(fd)

    def names(self, directory: str) -> list[str]:
        """Return the sorted names in *directory*, [] if it cannot be read."""
        try:
            fd = self._root.open_directory(directory)
        except OSError:
            return []
        try:
            return list_names(fd, MAX_NAMES)
        except OSError:
            return []
        finally:
            os.close(fd)

    def glob(self, directory: str, pattern: str) -> list[str]:
        """Return the paths in *directory* whose names match *pattern*."""
        names = fnmatch.filter(self.names(directory), pattern)
        return [posixpath.join(directory, name) for name in names]

    def exists(self, path: str) -> bool:
        """Return whether *path* exists, also as a dangling symlink."""
        return self.lstatus(path) is not None

    def is_directory(self, path: str) -> bool:
        """Return whether *path* leads to a directory."""
        status = self.status(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def is_program(self, path: str) -> bool:
        """Return whether *path* leads to an executable file."""
        status = self.status(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        return bool(status.st_mode & 0o111)

    def find_program(self, name: str, path: str | None = None) -> str:
        """Return the path of the program *name*, "" if there is none.

        *path* is the variable PATH of the process that starts it, by default that of the host.
        """
        if "/" in name:
            return name if self.is_program(name) else ""
        variable = self.environ.get("PATH", "") if path is None else path
        directories = [item for item in variable.split(":") if item.startswith("/")]
        for directory in dict.fromkeys([*directories, *STANDARD_PATH]):
            if self.is_program(f"{directory}/{name}"):
                return f"{directory}/{name}"
        return ""

    def beside(self, name: str) -> str:
        """Return the path of the program *name* beside the running one, "" if there is none."""
        if not self.is_live:
            return ""
        directories = (
            os.path.dirname(os.path.realpath(sys.argv[0])),
            os.path.join(sys.prefix, "bin"),
        )
        paths = [os.path.join(directory, os.path.basename(name)) for directory in directories]
        return next((path for path in paths if self.is_program(path)), "")

    def is_ours(self, path: str) -> bool:
        """Return whether the program *path* is our launcher, under any name."""
        data = self.read_bytes(path, _MAX_PROGRAM_BYTES)
        return data is not None and _OURS in data

    def output(self, *command: str) -> str:
        """Return the output of *command*, "" if it fails or takes too long, or for a tree.

        Only for commands that change nothing, such as `--version`.
        """
        if not self.is_live:
            return ""
        try:
            process = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=PROGRAM_TIMEOUT_S,
                cwd="/",
            )
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return ""
        return process.stdout[:_MAX_OUTPUT_BYTES].decode("utf-8", "replace")

    @property
    def config(self) -> Config:
        """The config.toml in force, or the defaults if it cannot be used."""
        if self._config is None:
            path = self.config_path()
            values: dict[str, Any] = {}
            if path:
                try:
                    values, _ = check.examine(files.parse(self.read(path) or "", path))
                except ConfigError:
                    values = {}
            self._config = Config(values, path or None)
        return self._config

    def config_path(self) -> str:
        """Return the path of the config.toml in force, "" if there is none."""
        return next((p for p in settings.search_path(self.environ) if self.exists(p)), "")

    def driver_root(self) -> RootCandidate:
        """Return the driver root."""
        return RootCandidate(self, self.config.driver_root or "/")

    def dev(self) -> str:
        """Return the directory of the device nodes: of the driver root if it has any, or /dev."""
        root = self.config.driver_root.rstrip("/")
        return f"{root}/dev" if root and self.exists(f"{root}/dev/nvidiactl") else "/dev"


def _content(fd: int, max_bytes: int) -> bytes | None:
    """Return the bytes of the regular file *fd* (O_PATH); None if it is not one, or larger.

    It is read in pieces: files of /proc/sys refuse to fill a large buffer.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    reader = reopen(fd, os.O_RDONLY)
    try:
        data = bytearray()
        while chunk := os.read(reader, _CHUNK_BYTES):
            data += chunk
            if len(data) > max_bytes:
                return None
        return bytes(data)
    finally:
        os.close(reader)


@dataclass(frozen=True, slots=True)
class RootCandidate:
    """A directory of a machine that may be a driver root."""

    machine: ExaminedMachine
    path: str

    def open(self) -> DriverRoot | None:
        """Return the directory as a driver root for discovery, None if it cannot be opened."""
        try:
            return DriverRoot(self.machine.path(self.path))
        except DiscoveryError:
            return None


def modified(machine: ExaminedMachine, paths: Sequence[str]) -> tuple[float, str]:
    """Return modification time and path of the newest of the files *paths*, or (0, "")."""
    entries = [(machine.status(path), path) for path in paths]
    return max(((status.st_mtime, path) for status, path in entries if status), default=(0.0, ""))
