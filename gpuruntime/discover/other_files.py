# SPDX-License-Identifier: Apache-2.0
"""The driver's files besides libraries: programs, configuration, Xorg, firmware, sockets."""

from __future__ import annotations

import os
import posixpath
import re
import stat

from gpuruntime.discover import driver_table, search_paths
from gpuruntime.discover.root import is_clean_host_path
from gpuruntime.errors import DiscoveryError
from gpuruntime.model import File
from gpuruntime.request.capabilities import COMPAT32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuruntime.discover.root import DriverRoot
    from gpuruntime.model import Library

    # A directory: the root to resolve it in, and its path there.
    Place = tuple[DriverRoot, str]

_BIN = "/usr/bin"
_RUN = ("/run", "/var/run")
MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 (where MPS has it, unless told otherwise)
# Where Debian has the libraries of one of several drivers.
_PRIVATE = re.compile(r"/usr/lib/([^/]+)/nvidia/([^/]+)\Z")


def private_directory(row: driver_table.Row, libraries: str) -> str | None:
    """Return where Debian keeps the file of *row* for a driver with *libraries* of its own."""
    match = _PRIVATE.match(libraries)
    if match is None or row.private is None:
        return None
    return row.private[0].replace("TRIPLET", match[1]).replace("PRIVATE", match[2])


class Finder:
    """Collects files of driver *version* below *root*, and what is wrong with some.

    *libraries* are those of the same driver.
    """

    def __init__(
        self, root: DriverRoot, version: str, native: str, libraries: Sequence[Library]
    ) -> None:
        self._root = root
        self._version = version
        self._native = native
        directories = dict.fromkeys(
            posixpath.dirname(library.host_path) for library in libraries if library.abi == native
        )
        self._directories = [root.around(path) for path in directories]
        self.found: dict[tuple[str, str], File] = {}
        self.problems: list[str] = []

    def binaries(self) -> None:
        """Find each program where PATH finds it first, or else beside the libraries.

        Whatever chain of alternatives leads to the file. The container has it in the same
        directory if the PATH of an image has that, else in /usr/bin.
        """
        usual = [
            (self._root, path, path if path in search_paths.IMAGE_PATH else _BIN)
            for path in search_paths.BINARIES
        ]
        beside = [
            (root, path, _BIN)
            for root, libraries in self._directories
            for path in search_paths.programs_beside(libraries)
        ]
        for row in driver_table.BINARIES:
            if not any(self._binary(row, *place) for place in (*usual, *beside)):
                self._private(row)

    def _binary(self, row: driver_table.Row, root: DriverRoot, directory: str, there: str) -> bool:
        """Add the program *row* of *directory* as one in *there*; return whether it exists."""
        real = self._file(root, f"{directory}/{row.name}")
        if not real or not root.is_executable(real):
            return False
        self._add(root, row, real, f"{there}/{row.name}")
        return True

    def configurations(self, search_path: Sequence[str], data_dirs: str) -> None:
        """Find files of configuration and data; *data_dirs* is XDG_DATA_DIRS.

        In the directories of *search_path*, host paths, or in the usual ones without.
        """
        bases = search_paths.configurations(self._root, search_path, data_dirs)
        for row in driver_table.CONFIGS:
            found = False
            if row.name.startswith(driver_table.ONCE):
                self._once(row, [*bases, (self._root, "")])
                continue
            for root, base in bases:
                for path in self._matching(root, base, row.name):
                    found |= self._config(root, row, path, path)
            if not found:
                self._private(row)

    def _once(self, row: driver_table.Row, bases: Sequence[Place]) -> None:
        """Add the files of *row*, each name once, below /etc: a loader reads all places."""
        seen: set[str] = set()
        for root, base in bases:
            for path in self._matching(root, base, row.name):
                name = path[len(base) + 1 :]
                if name not in seen and self._config(root, row, path, f"/etc/{name}"):
                    seen.add(name)

    def _config(
        self, root: DriverRoot, row: driver_table.Row, path: str, container_path: str
    ) -> bool:
        if self._abi(path) is None:
            return False
        real = self._file(root, path)
        if real:
            self._add(root, row, real, container_path)
        return bool(real)

    def data(self) -> None:
        """Find data beside the libraries."""
        for root, directory in self._directories:
            for row in driver_table.DATA:
                for path in self._matching(root, directory, row.name):
                    self._config(root, row, path, path)

    def xorg(self) -> None:
        """Find each module of Xorg where it is first."""
        bases = search_paths.xorg(self._root, self._directories)
        for row in driver_table.XORGS:
            if not any(self._module(row, root, directory) for root, directory in bases):
                self._private(row)

    def _module(self, row: driver_table.Row, root: DriverRoot, directory: str) -> bool:
        plain = row.name if not row.suffixes else f"{row.name}.so"
        names = [f"{plain}.{self._version}", plain] if row.suffixes else [plain]
        there = root.directory(directory)
        for name in names if there else ():
            path = f"{directory}/{name}"
            if there and name in there.names and self._is_ours(root, path):
                real = root.locate(path) or path
                # The name without a version may be all that alternatives link here.
                file = posixpath.basename(real) if row.suffixes else name
                if not row.suffixes or file == names[0]:
                    self._add(root, row, real, f"{directory}/{file}")
                    return True
        return False

    def _is_ours(self, root: DriverRoot, path: str) -> bool:
        try:
            return root.library(path)[1].abi == self._native
        except DiscoveryError as error:
            self.problems.append(error.message)
            return False

    def firmware(self, kernel_release: str) -> None:
        """Find the firmware of the version."""
        for row in driver_table.FIRMWARES:
            seen: set[str] = set()
            for directory in search_paths.firmware(self._root, kernel_release):
                for path in self._matching(self._root, directory, row.name):
                    real = self._file(self._root, path)
                    if real and real not in seen:
                        seen.add(real)
                        self._add(self._root, row, real, path)

    def sockets(self, mps_directory: str) -> None:
        """Find the sockets of the driver's daemons, and the directory where MPS has its pipes.

        *mps_directory* is what the operator says, "" for the usual place.
        """
        for row in driver_table.SOCKETS:
            for run in _RUN:
                found = self._root.special(f"{run}/{row.name}")
                if found and stat.S_ISSOCK(found[1].st_mode):
                    self._add(self._root, row, found[0], f"{run}/{row.name}")
                    break
        path = mps_directory or MPS_DIRECTORY
        found = self._root.special(path)
        if not found or not stat.S_ISDIR(found[1].st_mode):
            return
        if not mps_directory and found[1].st_uid not in (0, os.geteuid()):
            # Anybody can make that directory.
            self.problems.append(
                f'"{self._root.host_path(path)}" is left out: it belongs to uid {found[1].st_uid}'
            )
            return
        self._add(self._root, driver_table.MPS, found[0], path)

    def _private(self, row: driver_table.Row) -> None:
        """Add the file of *row* from where Debian keeps it, as its alternatives would link it."""
        if row.private is None:
            return
        for root, libraries in self._directories:
            directory = private_directory(row, libraries)
            if directory is None:
                continue
            pattern = posixpath.basename(row.name)
            if row.kind == driver_table.XORG and row.suffixes:
                pattern = f"{pattern}.so.{self._version}"
            for path in self._matching(root, directory, pattern):
                real = self._file(root, path)
                if real:
                    self._add(root, row, real, f"{row.private[1]}/{posixpath.basename(path)}")
                    return

    def _add(self, root: DriverRoot, row: driver_table.Row, real: str, path: str) -> None:
        if not is_clean_host_path(path):
            self.problems.append(f'"{root.host_path(path)}" cannot be named in a spec')
            return
        directory, name = posixpath.split(path)
        links = [link.replace("FILE", name).partition("::") for link in row.links]
        file = File(
            kind=row.kind,
            host_path=root.host_path(real),
            container_path=path,
            capability=row.capability if self._abi(name) in ("", self._native) else COMPAT32,
            links=tuple(f"{target}::{directory}/{link}" for target, _, link in links),
        )
        self.found.setdefault((path, row.kind), file)

    def _file(self, root: DriverRoot, path: str) -> str | None:
        """Return the file that *path* leads to; None, with a problem, if it cannot be used."""
        try:
            return root.file(path)
        except DiscoveryError as error:
            self.problems.append(error.message)
            return None

    def _matching(self, root: DriverRoot, base: str, pattern: str) -> list[str]:
        """Return the paths below *base* that match *pattern*, a pattern in its last part only."""
        parent, name = posixpath.split(pattern.replace(driver_table.VERSION, self._version))
        path = f"{base}/{parent}" if parent else base
        directory = root.directory(path or "/")
        if directory is None:
            return []
        names = sorted(each for each in directory.names if driver_table.matches(each, name))
        return [f"{path}/{each}" for each in names]

    def _abi(self, name: str) -> str | None:
        """Return the ABI that a file of this *name* is for: "" for any, None if it is not ours."""
        for mark, abi in driver_table.MACHINES.items():
            if f".{mark}." in name:
                return abi if abi in search_paths.abis(self._native) else None
        return ""
