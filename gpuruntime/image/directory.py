# SPDX-License-Identifier: Apache-2.0
"""Walk the root file system of an image in a directory: by descriptors, without following links.

Each name is opened relative to the descriptor of its directory, and a link is only read. So the
walk cannot leave the directory, even if it is changed meanwhile. Only regular files are opened.
"""

from __future__ import annotations

import os
import stat

from gpuruntime.errors import GpuRuntimeError, RequestError
from gpuruntime.image.collect import Collector, Full, read_of
from gpuruntime.image.contents import Binary, Contents
from gpuruntime.system.paths import reopen

MAX_DEPTH = 100
MAX_NAMES = 200_000  # of one directory
# The loader and the libraries are here: they come first in case a limit ends the walk.
_FIRST = ("etc", "lib", "lib64", "usr")
# Mounts of a running container.
_OF_CONTAINERS = ("/dev", "/proc", "/run", "/sys")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def read(path: str, collector: Collector) -> Contents:
    """Return the contents of the directory *path*; raise GpuRuntimeError if it cannot be read."""
    try:
        # The caller's own path, whose last name may be a link.
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(
            f'cannot open the root file system "{path}": {reason}',
            "name the directory that holds the image's bin, etc and usr",
        ) from error
    try:
        _Walk(root, collector).run()
    except Full:
        # The contents record the limit.
        pass
    except OSError as error:
        raise GpuRuntimeError(
            f'cannot read the root file system "{path}": {error.strerror}',
            "check the file system it is on",
        ) from error
    finally:
        os.close(root)
    return collector.contents


class _Walk:
    """The walk below the descriptor *root*, with one open directory a level."""

    def __init__(self, root: int, collector: Collector) -> None:
        self._root = root
        self._device = os.fstat(root).st_dev
        self._collector = collector
        # Files with several names are read once.
        self._seen: dict[tuple[int, int], Binary | None] = {}

    def run(self) -> None:
        self._directory(os.dup(self._root), "", 0)

    def _directory(self, fd: int, path: str, depth: int) -> None:
        """Examine the directory *fd*, and close it."""
        try:
            for name, kind in self._names(fd, path):
                self._entry(fd, name, f"{path}/{name}", kind, depth)
        finally:
            os.close(fd)

    def _names(self, fd: int, path: str) -> list[tuple[str, str]]:
        """Return name and kind of the entries."""
        rows: list[tuple[str, str]] = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if len(rows) >= MAX_NAMES:
                        why = f"it has more than {MAX_NAMES} names"
                        self._collector.leave_out(path, why, has_libraries=True)
                        break
                    self._collector.count()
                    rows.append((entry.name, _kind(entry)))
        except OSError as error:
            self._collector.leave_out(path or "/", str(error.strerror), has_libraries=True)
        if path == "":
            rows.sort(key=lambda row: (row[0] not in _FIRST, row[0]))
        return rows

    def _entry(self, parent: int, name: str, path: str, kind: str, depth: int) -> None:
        try:
            if kind == "link":
                self._collector.link(path, os.readlink(name, dir_fd=parent))
            elif kind == "file":
                self._file(parent, name, path)
            elif kind == "directory":
                self._below(parent, name, path, depth)
        except OSError as error:
            self._collector.leave_out(path, str(error.strerror))

    def _below(self, parent: int, name: str, path: str, depth: int) -> None:
        if depth >= MAX_DEPTH:
            self._collector.leave_out(path, f"it is below {MAX_DEPTH} directories")
            return
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
        if os.fstat(fd).st_dev != self._device:
            os.close(fd)
            if path not in _OF_CONTAINERS:
                self._collector.leave_out(path, "it is another file system", has_libraries=True)
            return
        self._directory(fd, path, depth + 1)

    def _file(self, parent: int, name: str, path: str) -> None:
        # The entry may have been replaced since it was listed.
        place = os.open(name, _NAME, dir_fd=parent)
        try:
            status = os.fstat(place)
            if not stat.S_ISREG(status.st_mode):
                return
            key = status.st_dev, status.st_ino
            if status.st_nlink > 1 and key in self._seen:
                self._again(path, self._seen[key])
                return
            binary = None
            if self._collector.wants(path, status.st_size):
                fd = reopen(place, os.O_RDONLY)
                try:
                    binary = self._collector.file(path, status.st_size, read_of(fd))
                finally:
                    os.close(fd)
            if status.st_nlink > 1:
                self._seen[key] = binary
        finally:
            os.close(place)

    def _again(self, path: str, binary: Binary | None) -> None:
        """Add another name of a file: like a link, it leads to the first."""
        if binary is not None:
            self._collector.link(path, binary.path)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else ""
