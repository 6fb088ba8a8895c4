# SPDX-License-Identifier: Apache-2.0
"""The user space of the driver below a driver root: its library directories, libraries, programs.

Every path is resolved inside the driver root, whose links may be absolute; what is recorded is the
file that a resolution ended at, and only if nobody but its owner can change it.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
import stat

from gpuruntime import elf, ldcache
from gpuruntime.discover import table
from gpuruntime.errors import DiscoveryError, DriverError, LdcacheError
from gpuruntime.model import Binary, Library
from gpuruntime.system.paths import Root, reopen
from gpuruntime.trust import may_trust

# Where distributions put the driver's 64-bit libraries; what the loader's cache names comes first.
LIBRARY_DIRECTORIES = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib",
)
BINARY_DIRECTORIES = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
)
NVML_NAME = "libnvidia-ml.so.1"
MAX_CACHE_BYTES = 8 << 20
_VERSIONED = re.compile(r"(lib[A-Za-z0-9_+-]+)\.so\.([0-9][0-9.]*)\Z")
_ABI_OF_MACHINE = {"x86_64": "x86-64", "aarch64": "aarch64"}


class DriverRoot:
    """A driver root: the host path it has, and the `Root` to resolve below it."""

    def __init__(self, path: str) -> None:
        """Open *path*; raise DiscoveryError if it is no directory."""
        self.path = os.path.realpath(path)
        try:
            self.root = Root(self.path)
        except OSError as error:
            raise DiscoveryError(
                f'cannot open the driver root "{path}": {error.strerror}',
                'name the directory where the driver is installed with "--driver-root"',
            ) from error

    def locate(self, path: str) -> tuple[str, os.stat_result] | None:
        """Return (path below the root, status) of the regular file that *path* leads to."""
        try:
            fd = self.root.open_path(path)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            return self._below(os.readlink(f"/proc/self/fd/{fd}")), status
        finally:
            os.close(fd)

    def names(self, directory: str) -> list[str]:
        """Return the sorted names in *directory*; none if it is not there."""
        try:
            fd = self.root.open_directory(directory)
        except OSError:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def host_path(self, path: str) -> str:
        """Return the host path of *path* below this root."""
        return path if self.path == "/" else self.path + path

    def elf(self, path: str) -> elf.Elf:
        """Read the ELF tables of *path*; raise DiscoveryError if it is no shared object."""
        fd = self.root.open_path(path)
        try:
            reader = reopen(fd, os.O_RDONLY)
        finally:
            os.close(fd)
        try:
            with os.fdopen(reader, "rb") as file:
                return elf.read(file)
        except elf.ElfError as error:
            raise DiscoveryError(
                f'"{self.host_path(path)}" is no library that can be used: {error}',
                "install the driver again",
            ) from error

    def _below(self, host_path: str) -> str:
        return host_path if self.path == "/" else host_path[len(self.path) :]


def find_nvml(driver: DriverRoot) -> str:
    """Return the host path of NVML below *driver*; raise DriverError if there is none."""
    for directory in library_directories(driver):
        found = driver.locate(f"{directory}/{NVML_NAME}")
        if found and driver.elf(found[0]).abi == native_abi():
            return driver.host_path(_checked(driver, *found))
    raise DriverError(
        f'no "{NVML_NAME}" below the driver root "{driver.path}"',
        'install the NVIDIA driver, or name its directory with "--driver-root"',
    )


def native_abi() -> str:
    """Return the ABI name of this machine's 64-bit programs."""
    return _ABI_OF_MACHINE.get(os.uname().machine, os.uname().machine)


def library_directories(driver: DriverRoot) -> list[str]:
    """Return where to look for driver libraries: the loader's directories, then the known."""
    found = dict.fromkeys(_cached_directories(driver))
    found.update(dict.fromkeys(LIBRARY_DIRECTORIES))
    return list(found)


def _cached_directories(driver: DriverRoot) -> list[str]:
    """Return where the driver root's own ld.so.cache has the driver's libraries."""
    try:
        data = driver.root.read_file("/etc/ld.so.cache", MAX_CACHE_BYTES)
        entries = ldcache.parse(data)
    except (OSError, LdcacheError):
        return []
    names = ("libcuda.so.1", NVML_NAME)
    return list(dict.fromkeys(posixpath.dirname(row[1]) for row in entries if row[0] in names))


def find_libraries(driver: DriverRoot, version: str) -> list[Library]:
    """Return the libraries of driver *version* for the default capabilities, in path order.

    Raises DiscoveryError if there is no libcuda of that version, naming the one there is.
    """
    files: dict[str, tuple[str, str]] = {}
    other_versions = set()
    for directory in library_directories(driver):
        for name in driver.names(directory):
            match = _VERSIONED.match(name)
            if not match:
                continue
            if match.group(2) != version:
                if match.group(1) == "libcuda" and "." in match.group(2):
                    other_versions.add(match.group(2))
                continue
            found = driver.locate(f"{directory}/{name}")
            if found:
                files.setdefault(_checked(driver, *found), (match.group(1), directory))
    described = {path: driver.elf(path) for path in files}
    native = {path: e for path, e in described.items() if e.abi == native_abi()}
    if not any(files[path][0] == "libcuda" for path in native):
        raise _missing_libcuda(driver, version, other_versions)
    return [
        Library(
            host_path=driver.host_path(path),
            container_path=path,
            soname=native[path].soname or posixpath.basename(path),
            abi=native[path].abi,
            dev_link=_dev_link(driver, native[path].soname, files[path]),
        )
        for path in sorted(_selected(files, native))
    ]


def _missing_libcuda(driver: DriverRoot, version: str, others: set[str]) -> DiscoveryError:
    if others:
        there = ", ".join(sorted(others))
        return DiscoveryError(
            f'driver {version} is loaded, but the libraries below "{driver.path}" are of {there}',
            "reboot, or reload the nvidia kernel modules, to finish the upgrade",
        )
    return DiscoveryError(
        f'no "libcuda.so.{version}" below the driver root "{driver.path}"',
        "install the driver's CUDA library (on Debian: libcuda1)",
    )


def _selected(files: dict[str, tuple[str, str]], described: dict[str, elf.Elf]) -> set[str]:
    """Return the paths of the default capabilities, closed over what they need of the driver."""
    chosen = {
        path
        for path in described
        if table.LIBRARIES.get(files[path][0]) in (None, *table.DEFAULT_CAPABILITIES)
    }
    by_soname = {described[p].soname or posixpath.basename(p): p for p in described}
    todo = list(chosen)
    while todo:
        for name in described[todo.pop()].needed:
            path = by_soname.get(name)
            if path and path not in chosen:
                chosen.add(path)
                todo.append(path)
    return chosen


def _dev_link(driver: DriverRoot, soname: str | None, file: tuple[str, str]) -> str:
    """Return the name of the `.so` link that the host has for a library, or ""."""
    name, directory = file
    link = f"{name}.so"
    if soname is None or not fnmatch.fnmatchcase(soname, f"{link}.*"):
        return ""
    # Programs open libcuda.so by that name, whether or not the host has its development link.
    if name == "libcuda" or driver.locate(f"{directory}/{link}"):
        return link
    return ""


def find_binaries(driver: DriverRoot) -> list[Binary]:
    """Return the programs for the default capabilities, each where PATH finds it first."""
    found = []
    for name, capability in table.BINARIES.items():
        if capability not in table.DEFAULT_CAPABILITIES:
            continue
        for directory in BINARY_DIRECTORIES:
            place = driver.locate(f"{directory}/{name}")
            if place and place[1].st_mode & 0o111:
                # Mounted where PATH finds it, whatever chain of alternatives leads to the file.
                path = driver.host_path(_checked(driver, *place))
                found.append(Binary(host_path=path, container_path=f"{directory}/{name}"))
                break
    return found


def _checked(driver: DriverRoot, path: str, status: os.stat_result) -> str:
    """Return *path*; raise DiscoveryError if others could change what containers will run."""
    if not may_trust(status):
        raise DiscoveryError(
            f'"{driver.host_path(path)}" belongs to uid {status.st_uid}, mode '
            f"{stat.S_IMODE(status.st_mode):04o}: others than root can change it",
            "give the driver's files to root and take write access from group and others",
        )
    return path
