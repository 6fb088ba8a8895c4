# SPDX-License-Identifier: Apache-2.0
"""The driver's files besides libraries: programs, configuration, Xorg, firmware, sockets."""

from __future__ import annotations

import os
import posixpath
import re
import stat

from gpuruntime.discover import driver_table, programs, search_paths
from gpuruntime.discover.root import is_clean_host_path
from gpuruntime.errors import DiscoveryError
from gpuruntime.model import File
from gpuruntime.request.capabilities import COMPAT32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpuruntime.discover.root import DriverRoot
    from gpuruntime.model import Library

    # A directory: the root to resolve it in, and its path there.
    Place = tuple[DriverRoot, str]

_RUN = ("/run", "/var/run")
MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 (the default of MPS)
# Where Debian puts the libraries of one of several drivers.
_PRIVATE = re.compile(r"/usr/lib/([^/]+)/nvidia/([^/]+)\Z")


def private_directory(row: driver_table.Row, libraries: str) -> str | None:
    """Return where Debian keeps the file of *row* of the driver whose *libraries* are private."""
    match = _PRIVATE.match(libraries)
    if match is None or row.private is None:
        return None
    return row.private[0].replace("TRIPLET", match[1]).replace("PRIVATE", match[2])


class Finder:
    """A search for the files of driver *version* below *root*, and for problems with them.

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
        self.files: dict[tuple[str, str], File] = {}
        self.problems: list[str] = []

    def binaries(self, search_path: Sequence[str], path: str) -> None:
        """Find each program in the first of the directories of `programs.places` that has it.

        The file may be the end of a chain of alternatives. *search_path*, host paths, replaces the
        usual directories; *path* is the PATH of the host. A script that starts the program, or a
        program that needs the host's own loader, is used only if there is no other.
        """
        places = programs.places(self._root, self._directories, search_path, path)
        doubtful: dict[str, list[str]] = {}
        for row in driver_table.BINARIES:
            fallback: tuple[programs.Place, str, str] | None = None
            for place, real in self._programs(row, places):
                reason = programs.doubt(place.root, real, self._native)
                if not reason:
                    self._program(row, place, real)
                    break
                fallback = fallback or (place, real, reason)
            else:
                if self._private(row) or fallback is None:
                    continue
                place, real, reason = fallback
                doubtful.setdefault(reason, []).append(f'"{place.root.host_path(real)}"')
                self._program(row, place, real)
        for reason, paths in doubtful.items():
            self.problems.append(f"{', '.join(paths)} may not run in a container: {reason}")

    def _programs(
        self, row: driver_table.Row, places: Sequence[programs.Place]
    ) -> Iterator[tuple[programs.Place, str]]:
        """Yield the executable files of the program *row*, each with the place it is found by."""
        for place in places:
            real = self._file(place.root, f"{place.path}/{row.name}")
            if not real or not place.root.is_executable(real):
                continue
            try:
                programs.check(place)
            except DiscoveryError as error:
                self.problems.append(
                    f'"{place.host_path}/{row.name}" is left out: {error.message}'
                )
                continue
            yield place, real
            original = self._file(place.root, programs.original(real))
            if original and place.root.is_executable(original):
                yield place, original

    def _program(self, row: driver_table.Row, place: programs.Place, real: str) -> None:
        self._add(place.root, row, real, f"{place.container_path}/{row.name}")

    def configurations(self, search_path: Sequence[str], data_dirs: str) -> None:
        """Find files of configuration and data; *data_dirs* is XDG_DATA_DIRS.

        *search_path*, a list of host paths, replaces the usual directories.
        """
        usual = search_paths.configurations(self._root, search_path, data_dirs)
        beside = [] if search_path else search_paths.configurations_beside(self._directories)
        for row in driver_table.CONFIGS:
            is_once = row.name.startswith(driver_table.ONCE)
            bases = [*usual, (self._root, "")] if is_once else usual
            names: set[str] = set()
            for root, base in dict.fromkeys([*bases, *beside]):
                # A usual directory may have a link to the file beside the libraries.
                is_first_only = is_once or (root, base) not in bases
                place = "/etc" if is_once else search_paths.container_data(base)
                for path in self._matching(root, base, row.name):
                    name = path[len(base) + 1 :]
                    if is_first_only and name in names:
                        continue
                    if self._config(root, row, path, f"{place}/{name}"):
                        names.add(name)
            if not names:
                self._private(row)

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
        """Find each Xorg module in the first directory that has it."""
        bases = search_paths.xorg(self._root, self._directories)
        for row in driver_table.XORGS:
            if not any(self._module(row, root, directory) for root, directory in bases):
                self._private(row)

    def _module(self, row: driver_table.Row, root: DriverRoot, directory: str) -> bool:
        plain = row.name if not row.suffixes else f"{row.name}.so"
        names = [f"{plain}.{self._version}", plain] if row.suffixes else [plain]
        opened = root.directory(directory)
        for name in names if opened else ():
            path = f"{directory}/{name}"
            if opened and name in opened.names and self._is_ours(root, path):
                real = root.locate(path) or path
                # Alternatives may link only the name without a version here.
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
            real_paths: set[str] = set()
            for directory in search_paths.firmware(self._root, kernel_release):
                for path in self._matching(self._root, directory, row.name):
                    real = self._file(self._root, path)
                    if real and real not in real_paths:
                        real_paths.add(real)
                        self._add(self._root, row, real, path)

    def sockets(self, mps_directory: str) -> None:
        """Find the sockets of the driver's daemons, and the pipe directory of MPS.

        *mps_directory* is the operator's setting, "" for the default.
        """
        for row in driver_table.SOCKETS:
            for run in _RUN:
                special = self._root.special(f"{run}/{row.name}")
                if special and stat.S_ISSOCK(special[1].st_mode):
                    self._add(self._root, row, special[0], f"{run}/{row.name}")
                    break
        path = mps_directory or MPS_DIRECTORY
        special = self._root.special(path)
        if not special or not stat.S_ISDIR(special[1].st_mode):
            return
        if not mps_directory and special[1].st_uid not in (0, os.geteuid()):
            # Any user can create that directory.
            self.problems.append(
                f'"{self._root.host_path(path)}" is left out: '
                f"it belongs to uid {special[1].st_uid}"
            )
            return
        self._add(self._root, driver_table.MPS, special[0], path)

    def _private(self, row: driver_table.Row) -> bool:
        """Add *row*'s file from Debian's private directory, where alternatives would link it.

        Return whether there is one.
        """
        if row.private is None:
            return False
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
                    return True
        return False

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
        self.files.setdefault((path, row.kind), file)

    def _file(self, root: DriverRoot, path: str) -> str | None:
        """Return the real path of the file *path*; None, with a problem, if it is unusable."""
        try:
            return root.file(path)
        except DiscoveryError as error:
            self.problems.append(error.message)
            return None

    def _matching(self, root: DriverRoot, base: str, pattern: str) -> list[str]:
        """Return the paths below *base* that match *pattern*; only its last part has wildcards."""
        parent, name = posixpath.split(pattern.replace(driver_table.VERSION, self._version))
        path = f"{base}/{parent}" if parent else base
        directory = root.directory(path or "/")
        if directory is None:
            return []
        names = sorted(entry for entry in directory.names if driver_table.matches(entry, name))
        return [f"{path}/{entry}" for entry in names]

    def _abi(self, name: str) -> str | None:
        """Return the ABI of the file *name*: "" for any, None if this host does not run it."""
        for mark, abi in driver_table.MACHINES.items():
            if f".{mark}." in name:
                return abi if abi in search_paths.abis(self._native) else None
        return ""
