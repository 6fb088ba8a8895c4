# SPDX-License-Identifier: Apache-2.0
"""The libraries of one driver version: which exist, for which use, and under which names."""

from __future__ import annotations

import posixpath
import re

from gpuruntime import remedies
from gpuruntime.discover import driver_table, search_paths, user_space_version
from gpuruntime.errors import DiscoveryError, GpuRuntimeError
from gpuruntime.formats.driver_version import of_name
from gpuruntime.model import Library
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuruntime.discover.root import Directory, DriverRoot
    from gpuruntime.formats.elf import Elf

# The driver cannot be used without these two.
REQUIRED = ("libcuda", "libnvidia-ml")
_SONAME = re.compile(r"[A-Za-z0-9_.+~@-]+\Z")


class LibraryFile(Record):
    """A library's file: its *root*, its *path* in it, and its ELF data.

    *versioned* is true if the file is named with the driver's version.
    """

    __slots__ = ("elf", "path", "root", "row", "soname", "versioned")

    def __init__(
        self,
        *,
        root: DriverRoot,
        path: str,
        row: driver_table.Row,
        elf: Elf,
        soname: str,
        versioned: bool,
    ) -> None:
        self.root = root
        self.path = path
        self.row = row
        self.elf = elf
        self.soname = soname
        self.versioned = versioned

    @property
    def host_path(self) -> str:
        """The file's path on the host."""
        return self.root.host_path(self.path)


class _Scan:
    """What the directories hold, by kind."""

    def __init__(self) -> None:
        # Keyed by the real path on the host.
        self.files: dict[str, LibraryFile] = {}
        self.refused: dict[str, list[DiscoveryError]] = {}
        # Directories, and the libraries of other driver versions in them: stem → versions.
        self.others: list[tuple[Directory, dict[str, set[str]]]] = []


def find(
    root: DriverRoot, directories: Sequence[Directory], driver_version: str, native: str
) -> tuple[list[Library], list[str]]:
    """Return the libraries of *driver_version* in *directories*, and sentences about problems.

    Raises DiscoveryError if libcuda or NVML of that version for ABI *native* is missing.
    """
    scan = _Scan()
    for directory in directories:
        _read(scan, directory, driver_version)
    files = _unique(_belonging(scan), search_paths.abis(native))
    for stem in REQUIRED:
        if not any(file.row.name == stem and file.elf.abi == native for file in files):
            raise _missing(root, directories, scan, stem, (driver_version, native))
    linked = _links_elsewhere(files, directories)
    libraries = [_library(file, linked.get(file.host_path, ())) for file in files]
    libraries.sort(key=lambda library: library.container_path)
    problems = [str(error.message) for errors in scan.refused.values() for error in errors]
    problems += _missing_needed(libraries, driver_version)
    problems += _half_upgraded(scan, files, driver_version, search_paths.abis(native))
    return libraries, problems


def _read(scan: _Scan, directory: Directory, driver_version: str) -> None:
    """Add the libraries of *directory* to *scan*."""
    other_versions: dict[str, set[str]] = {}
    for name in sorted(name for name in directory.names if ".so." in name):
        stem, dot, suffix = name.partition(".so.")
        if not dot or not (suffix == driver_version or stem in driver_table.LIBRARIES):
            continue
        row = driver_table.LIBRARIES.get(stem)
        if row is None:
            if not stem.startswith("lib"):
                continue
            row = driver_table.unknown(stem)
        if not _is_of(row, suffix, driver_version):
            if driver_table.VERSION in row.suffixes and of_name(name):
                other_versions.setdefault(stem, set()).add(suffix)
            continue
        if row.capability == driver_table.NEVER or row.kind != driver_table.LIBRARY:
            continue
        try:
            _add(scan, directory, name, row, versioned=suffix == driver_version)
        except DiscoveryError as error:
            scan.refused.setdefault(stem, []).append(error)
    if other_versions:
        scan.others.append((directory, other_versions))


def _is_of(row: driver_table.Row, suffix: str, driver_version: str) -> bool:
    return any(
        suffix == driver_version
        if pattern == driver_table.VERSION
        else driver_table.matches(suffix, pattern)
        for pattern in row.suffixes
    )


def _add(
    scan: _Scan, directory: Directory, name: str, row: driver_table.Row, *, versioned: bool
) -> None:
    root = directory.root
    path, elf = root.library(directory.join(name))
    if root.host_path(path) in scan.files:
        return
    soname = elf.soname or posixpath.basename(path)
    stem, dot, _ = soname.partition(".so")
    if not dot or not _SONAME.match(soname):
        raise DiscoveryError(
            f'"{root.host_path(path)}" has the SONAME "{soname}", which is no name of a library',
            remedies.REINSTALL_DRIVER,
        )
    if stem != row.name and root.locate(directory.join(soname)) not in (path, None):
        # Another file has that name: use the name of the file itself.
        soname = posixpath.basename(path)
    elif stem != row.name:
        # The SONAME counts, not the name of the file.
        row = driver_table.LIBRARIES.get(stem) or driver_table.unknown(stem)
        if row.capability == driver_table.NEVER:
            return
    file = LibraryFile(root=root, path=path, row=row, elf=elf, soname=soname, versioned=versioned)
    scan.files[file.host_path] = file


def _belonging(scan: _Scan) -> list[LibraryFile]:
    """Return the files that belong to the driver.

    A library with its own version number does not belong to it if its directory has only another
    driver's libraries, or if the driver has no library for its ABI.
    """
    files = list(scan.files.values())
    versioned = [file for file in files if file.versioned]
    abis = {file.elf.abi for file in versioned}
    directories = {posixpath.dirname(file.host_path) for file in versioned}
    directories_of_others = {
        directory.root.host_path(directory.path) for directory, _ in scan.others
    } - directories
    return [
        file
        for file in files
        if file.elf.abi in abis and posixpath.dirname(file.host_path) not in directories_of_others
    ]


def _unique(files: Iterable[LibraryFile], abis: Sequence[str]) -> list[LibraryFile]:
    """Return those of *files* for *abis*, the first of each SONAME.

    The directory of VDPAU counts separately, because it may hold a copy.
    """
    first: dict[tuple[str, str, bool], LibraryFile] = {}
    for file in files:
        if file.elf.abi not in abis:
            continue
        key = file.elf.abi, file.soname, posixpath.dirname(file.path).endswith("/vdpau")
        previous = first.get(key)
        if previous is None or _is_linked(file, previous):
            first[key] = file
    return list(first.values())


def _is_linked(file: LibraryFile, other: LibraryFile) -> bool:
    """Return whether both files are in one directory and their SONAME leads to *file*."""
    directory = posixpath.dirname(file.path)
    if directory != posixpath.dirname(other.path) or file.root is not other.root:
        return False
    return file.root.locate(f"{directory}/{file.soname}") == file.path


def _links_elsewhere(
    files: Sequence[LibraryFile], directories: Sequence[Directory]
) -> dict[str, list[str]]:
    """Return host path → symlinks to that library in other *directories* than its own.

    Debian's alternatives, for example, link from the usual directories to the driver's.
    """
    links: dict[str, list[str]] = {}
    candidates = []
    for file in files:
        names = [file.soname, _plain(file.soname)]
        names += [place for place in map(_place, file.row.links) if "/" in place]
        candidates.append((file, posixpath.dirname(file.path), names))
    for directory in directories:
        for file, own_directory, names in candidates:
            if file.root is not directory.root or own_directory == directory.path:
                continue
            for name in names:
                # The first part is the name or, for a library such as GBM's, a subdirectory.
                if name.partition("/")[0] not in directory.names:
                    continue
                if file.root.locate(directory.join(name)) == file.path:
                    links.setdefault(file.host_path, []).append(_link(file, directory, name))
    return links


def _link(file: LibraryFile, directory: Directory, name: str) -> str:
    """Return the symlink *name* in *directory* to the SONAME symlink beside *file*."""
    path = directory.join(name)
    target = posixpath.join(posixpath.dirname(file.path), file.soname)
    return f"{posixpath.relpath(target, posixpath.dirname(path))}::{path}"


def _place(link: str) -> str:
    return link.partition("::")[2]


def _library(file: LibraryFile, links_elsewhere: Sequence[str]) -> Library:
    directory, name = posixpath.split(file.path)
    dev_link = _dev_link(file, directory)
    links = list(links_elsewhere)
    for link in file.row.links:
        target, _, place = link.partition("::")
        target = target.replace("FILE", name).replace("SONAME", file.soname)
        if place == _plain(file.soname) and target == file.soname:
            dev_link = place
        else:
            links.append(f"{target}::{posixpath.join(directory, place)}")
    return Library(
        host_path=file.host_path,
        container_path=file.path,
        soname=file.soname,
        abi=file.elf.abi,
        capability=file.row.capability,
        needed=tuple(dict.fromkeys([*file.elf.needed, *file.row.opens])),
        dev_link=dev_link,
        links=tuple(links),
    )


def _plain(soname: str) -> str:
    return soname.partition(".so")[0] + ".so"


def _dev_link(file: LibraryFile, directory: str) -> str:
    """Return the name of the library's `.so` symlink on the host, "" if there is none."""
    plain = _plain(file.soname)
    opened = file.root.directory(directory)
    if plain == file.soname or opened is None or plain not in opened.names:
        return ""
    return plain if file.root.is_link(f"{directory}/{plain}") else ""


def _missing(
    root: DriverRoot,
    directories: Sequence[Directory],
    scan: _Scan,
    stem: str,
    version_and_abi: tuple[str, str],
) -> GpuRuntimeError:
    """Return the error that there is no *stem* of that driver version and ABI."""
    driver_version, native = version_and_abi
    for error in scan.refused.get(stem, ()):
        return error
    for file in scan.files.values():
        if file.row.name == stem:
            return DiscoveryError(
                f'"{file.host_path}" is for {file.elf.abi or "another machine"}, and there is '
                f"none for {native}",
                remedies.INSTALL_FOR_MACHINE,
            )
    versions = {
        version for _, other_versions in scan.others for version in other_versions.get(stem, ())
    }
    if versions and stem == "libcuda":
        return user_space_version.mismatch(root, driver_version, sorted(versions))
    if versions:
        return DiscoveryError(
            f'libcuda below the driver root "{root.path}" is of driver {driver_version}, but '
            f"{stem} is of {', '.join(sorted(versions))}",
            "install the rest of the driver in the same version",
        )
    searched = ", ".join(directory.path for directory in directories) or "none"
    package = {"libcuda": "libcuda1", "libnvidia-ml": "libnvidia-ml1"}[stem]
    return DiscoveryError(
        f'no "{stem}.so.{driver_version}" below the driver root "{root.path}"; directories '
        f"searched: {searched}",
        f"install the driver's {stem} (on Debian: {package})",
    )


def _missing_needed(libraries: Sequence[Library], driver_version: str) -> list[str]:
    """Return sentences about libraries of the driver that others need and that are missing."""
    sonames = {(library.abi, library.soname) for library in libraries}
    missing: dict[str, list[str]] = {}
    for library in libraries:
        for name in library.needed:
            if (library.abi, name) not in sonames and _is_drivers(name, driver_version):
                missing.setdefault(name, []).append(library.host_path)
    return [
        f'"{name}" is missing, which "{paths[0]}" needs'
        + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        for name, paths in missing.items()
    ]


def _is_drivers(name: str, driver_version: str) -> bool:
    row = driver_table.LIBRARIES.get(name.partition(".so")[0])
    if row is not None:
        return row.capability != driver_table.NEVER
    return name.endswith(f".so.{driver_version}")


def _half_upgraded(
    scan: _Scan, files: Sequence[LibraryFile], driver_version: str, abis: Sequence[str]
) -> list[str]:
    """Return sentences about libraries that are left over from another driver version.

    In a directory of this driver, these are the libraries that it lacks. A directory without any
    of this driver's libraries is reported only if it has an ABI that this driver lacks.
    """
    ours = {posixpath.dirname(file.host_path) for file in files}
    stems = {file.row.name for file in files}
    problems = []
    for directory, other_versions in scan.others:
        path = directory.root.host_path(directory.path)
        names = sorted(
            f"{stem}.so.{version}"
            for stem, versions in other_versions.items()
            for version in versions
            if not driver_table.is_over(stem, driver_version)
        )
        if path in ours:
            names = [name for name in names if name.partition(".so.")[0] not in stems]
        elif not names or _abi(directory, names[0]) not in set(abis) - {f.elf.abi for f in files}:
            continue
        if names:
            problems.append(
                f"left out, because they are not of driver {driver_version}: "
                f'{", ".join(names)} in "{path}"'
            )
    return problems


def _abi(directory: Directory, name: str) -> str:
    try:
        return directory.root.library(directory.join(name))[1].abi
    except DiscoveryError:
        return ""
