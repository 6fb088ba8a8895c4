# SPDX-License-Identifier: Apache-2.0
"""CUDA forward compatibility: prefer a driver library of the image that is newer than the host's.

On the start path. Such a library is used if it says itself that it runs on the host's driver.
Nothing of it is executed or mounted: the loader is configured to look there first.
"""

from __future__ import annotations

import _stat as stat
import errno
import io
import posix as os

from gpuruntime.formats import ldcache_merge
from gpuruntime.record import Record
from gpuruntime.system import clean_names, drop_in
from gpuruntime.system.operation import Operation
from gpuruntime.system.paths import list_names, reopen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuruntime.system.paths import Root

DEFAULT_ROOT = "/usr/local/cuda/compat"
MAX_NAMES = 100_000
MAX_LIBRARIES = 100
_PREFIX = "libcuda.so."


class CudaCompat(Operation):
    """Have the libraries in *directory* found first, if they are right for the host's driver."""

    __slots__ = ("directory", "host_cuda_version", "host_driver_version")

    def __init__(
        self,
        host_driver_version: str,
        host_cuda_version: str = "",
        directory: str = DEFAULT_ROOT,
    ) -> None:
        self.host_driver_version = host_driver_version
        self.host_cuda_version = host_cuda_version
        self.directory = directory

    def describe(self) -> str:
        """Return the operation in one line."""
        than = self.host_driver_version or f"of CUDA {self.host_cuda_version}"
        return f"use the CUDA libraries in {self.directory} if they are for a driver like {than}"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*: for the container's ldconfig."""
        self.apply(root, warn)

    def apply(
        self, root: Root, warn: Callable[[str], None]
    ) -> tuple[ldcache_merge.CacheEntry, ...]:
        """Carry it out, and return the entries for the loader's cache."""
        in_use = self._find(root, warn)
        try:
            if in_use is None:
                drop_in.remove(root, drop_in.COMPAT)
            else:
                drop_in.write(root, drop_in.COMPAT, [in_use[0]], warn)
        except OSError as error:
            warn(f'cannot write "{drop_in.DIRECTORY}/{drop_in.COMPAT}" in the container: {error}')
        return in_use[1] if in_use else ()

    def _find(
        self, root: Root, warn: Callable[[str], None]
    ) -> tuple[str, tuple[ldcache_merge.CacheEntry, ...]] | None:
        """Return the directory, without links, and its libraries, if they are to be used."""
        try:
            fd, path = root.resolve(self.directory)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                warn(f'"{self.directory}" in the container is not searched for CUDA: {error}')
            return None
        try:
            dirfd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        except OSError as error:
            warn(f'"{self.directory}" in the container is not searched for CUDA: {error}')
            return None
        finally:
            os.close(fd)
        try:
            if not self._is_usable(dirfd, warn):
                return None
            if not clean_names.is_clean(path):
                warn(f'"{path}" in the container is not used for CUDA: a name that is not plain')
                return None
            return path, _entries(dirfd, path)
        except OSError as error:
            warn(f'"{self.directory}" in the container is not searched for CUDA: {error}')
            return None
        finally:
            os.close(dirfd)

    def _is_usable(self, dirfd: int, warn: Callable[[str], None]) -> bool:
        """Return whether the one CUDA library in *dirfd* is right for the host's driver."""
        # A module of its own: few images have the directory.
        from gpuruntime.formats import cuda_note  # noqa: PLC0415

        names = [
            name
            for name in list_names(dirfd, MAX_NAMES)
            if name.startswith(_PREFIX)
            and "." in name[len(_PREFIX) :]
            and stat.S_ISREG(os.stat(name, dir_fd=dirfd, follow_symlinks=False).st_mode)
        ]
        if len(names) > 1:
            warn(f'"{self.directory}" in the container is not used: {len(names)} CUDA libraries')
        if len(names) != 1:
            return False
        fd = _open_regular(dirfd, names[0])
        if fd < 0:
            return False
        note = None
        try:
            note = cuda_note.read_note(lambda offset, size: os.pread(fd, size, offset))
        except cuda_note.NoteError as error:
            warn(f'"{names[0]}" in the container does not say what driver it is for: {error}')
        finally:
            os.close(fd)
        return cuda_note.is_usable(
            names[0][len(_PREFIX) :], note, self.host_driver_version, self.host_cuda_version
        )


class CompatInUse(Record):
    """What an earlier hook of this start found to be right, for the hook that writes the cache."""

    __slots__ = ()

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"use the CUDA libraries that {drop_in.COMPAT} names"

    def apply(
        self, root: Root, warn: Callable[[str], None]
    ) -> tuple[ldcache_merge.CacheEntry, ...]:
        """Return the entries for the loader's cache."""
        del warn
        for path in drop_in.read(root, drop_in.COMPAT)[:1]:
            try:
                dirfd = root.open_directory(path)
                try:
                    return _entries(dirfd, path)
                finally:
                    os.close(dirfd)
            except OSError:
                # Nothing is there any more: the driver's own libraries are used.
                break
        return ()


def _entries(dirfd: int, path: str) -> tuple[ldcache_merge.CacheEntry, ...]:
    """Return an entry for each library in *dirfd*, the directory *path*, and its `.so` link."""
    listed = [name for name in list_names(dirfd, MAX_NAMES) if clean_names.is_clean_name(name)]
    libraries = [name for name in listed if name.startswith("lib") and ".so" in name]
    # Name of a file or link → its library's flags.
    flags: dict[str, int] = {}
    entries = []
    for name in libraries[:MAX_LIBRARIES]:
        soname, abi_flags = _read_library(dirfd, name)
        if soname:
            value = soname if soname in listed else name
            entries.append(ldcache_merge.CacheEntry(soname, f"{path}/{value}", abi_flags))
            flags[name] = flags[soname] = abi_flags
    for name in libraries[:MAX_LIBRARIES]:
        if name.endswith(".so") and name not in flags:
            target = _target(dirfd, name)
            if target in flags:
                entries.append(ldcache_merge.CacheEntry(name, f"{path}/{name}", flags[target]))
    return tuple(entries)


def _read_library(dirfd: int, name: str) -> tuple[str, int]:
    """Return SONAME and cache flags of the library *name*, "" for what is none."""
    from gpuruntime.formats import elf  # noqa: PLC0415 (few images have the directory)

    fd = _open_regular(dirfd, name)
    if fd < 0:
        return "", 0
    with io.BufferedReader(io.FileIO(fd)) as file:
        try:
            library = elf.read(file)
        except (elf.ElfError, OSError):
            return "", 0
    soname = library.soname or name
    if library.abi not in ldcache_merge.ABI_FLAGS or not clean_names.is_clean_name(soname):
        return "", 0
    return soname, ldcache_merge.ABI_FLAGS[library.abi]


def _target(dirfd: int, name: str) -> str:
    try:
        return os.readlink(name, dir_fd=dirfd)
    except OSError:
        return ""


def _open_regular(dirfd: int, name: str) -> int:
    """Return a descriptor that reads the regular file *name*, -1 if it is none."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd)
    except OSError:
        return -1
    try:
        return reopen(fd, os.O_RDONLY) if stat.S_ISREG(os.fstat(fd).st_mode) else -1
    finally:
        os.close(fd)
