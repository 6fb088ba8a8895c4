# SPDX-License-Identifier: Apache-2.0
"""Let a container's loader find libraries: glibc by its cache, musl by its list of directories.

On the start path. Nothing from the container is executed, and from the host only its ldconfig, if
the operator wants that and the container's cache cannot be merged with (system/sandbox.py).
"""

from __future__ import annotations

import _stat as stat
import errno
import posix as os

from cdi.pathnames import basename, dirname
from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache_merge
from gpuruntime.system import clean_names, drop_in, mounts
from gpuruntime.system.operation import Operation
from gpuruntime.system.paths import LEADS_NOWHERE, Root, mount_id, read_of_image
from gpuruntime.system.replace import remove_name, replace_file
from gpuruntime.system.syscalls import SyscallError
from gpuruntime.system.text import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Union

    from gpuruntime.system.compat import CompatInUse, CudaCompat

    Compat = Union[CudaCompat, CompatInUse]

CACHE = "/etc/ld.so.cache"
MAX_CACHE_BYTES = 8 << 20
MAX_LIST_BYTES = 64 << 10
# Whoever wants a library from there opens it by its path.
_PLUGIN_DIRECTORIES = ("vdpau",)
# What glibc's loader searches without any cache.
_DEFAULT_DIRECTORIES = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
# What musl's loader searches without a list; a list is in place of them.
_MUSL_DIRECTORIES = ("/lib", "/usr/local/lib", "/usr/lib")
# ABI of libraries → how musl calls it.
_MUSL = {"x86-64": "x86_64", "aarch64": "aarch64", "i386": "i386", "riscv64": "riscv64"}


class LoaderCache(Operation):
    """Let the container's loader find *entries*, now and after its own ldconfig has run.

    Those of *compat*, where it is to be used, are found first. *ldconfig* is the host's, to be run
    where the image's cache cannot be merged with, "" if it must not be. *may_cover* is for a cache
    on a read-only mount: there are mounts of the container's own.
    """

    __slots__ = ("compat", "entries", "ldconfig", "may_cover")

    def __init__(
        self,
        entries: tuple[ldcache_merge.CacheEntry, ...],
        compat: Compat | None = None,
        ldconfig: str = "",
        *,
        may_cover: bool = True,
    ) -> None:
        self.entries = entries
        self.compat = compat
        self.ldconfig = ldconfig
        self.may_cover = may_cover

    def describe(self) -> str:
        """Return the operation in one line."""
        first = f"; first, {self.compat.describe()}" if self.compat else ""
        return f"add {len(self.entries)} libraries to {CACHE}{first}"

    def directories(self) -> list[str]:
        """Return the directories of the libraries, each once."""
        return list(dict.fromkeys(dirname(entry.path) for entry in self.entries))

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*.

        Raises LdcacheError if that fails and the loader would not find the libraries anyway.
        """
        first = self.compat.apply(root, warn) if self.compat else ()
        old, what = None, CACHE
        try:
            image, old = self._read_cache(root)
            if old is image and _was_lost(root, image):
                warn(
                    f'"{CACHE}" in the container is empty, as after a power cut: what the image '
                    "had in it is not found until its own ldconfig has run"
                )
            if self.may_cover:
                self._remove_empty(root, image, first, warn)
            old, new = self._merge(root, image, old, (*first, *self.entries))
            may_write = new == image or _write_cache(root, new, may_cover=self.may_cover)
            what = drop_in.DIRECTORY
            # Where the cache can only be covered, there is no ldconfig that could run.
            if may_write:
                self._write_drop_in(root, old, warn)
            what = "/etc/ld-musl-*.path"
            self._write_musl_lists(root)
        except (OSError, LdcacheError) as error:
            why = error.message if isinstance(error, LdcacheError) else str(error)
            hidden = self._not_found_without(root, old)
            if hidden:
                when = "once its own ldconfig has run, " if what == drop_in.DIRECTORY else ""
                raise LdcacheError(
                    f'cannot write "{what}" in the container: {why}; '
                    f'{when}its loader would not find "{hidden[0]}"',
                    _hint(error, what),
                ) from error
            warn(f'"{what}" in the container stays as it is: {why}')

    def _remove_empty(
        self,
        root: Root,
        image: bytes | None,
        first: tuple[ldcache_merge.CacheEntry, ...],
        warn: Callable[[str], None],
    ) -> None:
        """Remove the names of driver libraries that are empty files in the image.

        An image made of a container that had them has an empty file where each was mounted. A
        loader does not pass over one: it ends with "file too short".
        """
        ours = {entry.path for entry in (*first, *self.entries)}
        try:
            paths = ldcache_merge.driver_paths(image)
        except LdcacheError:
            # No loader reads it.
            return
        for path in paths:
            if path in ours or not clean_names.is_clean(path) or not _is_empty(root, path):
                continue
            try:
                remove_name(root.directory(dirname(path)), basename(path))
            except OSError as error:
                warn(
                    f'"{path}" in the container is an empty file that its loader refuses as too '
                    f"short, and cannot be removed: {error.strerror}"
                )

    def _read_cache(self, root: Root) -> tuple[bytes | None, bytes | None]:
        """Return the image's cache, and the one to merge with: the same, or that of ldconfig."""
        image = None
        try:
            image = _read_cache(root)
            if self.ldconfig:
                _refuse_damage(root, image)
        except (OSError, LdcacheError) as error:
            if not self.ldconfig or (isinstance(error, OSError) and error.errno != errno.EFBIG):
                raise
            return image, _build_cache(root, self.ldconfig)
        return image, image

    def _merge(
        self,
        root: Root,
        image: bytes | None,
        old: bytes | None,
        entries: tuple[ldcache_merge.CacheEntry, ...],
    ) -> tuple[bytes | None, bytes]:
        """Return what was merged with, *old* or else ldconfig's, and what came of it."""
        keep_first = drop_in.listed_before(root)
        try:
            return old, ldcache_merge.merge(old, entries, keep_first=keep_first)
        except LdcacheError:
            # What ldconfig has made already will not be better a second time.
            if not self.ldconfig or old is not image:
                raise
        old = _build_cache(root, self.ldconfig)
        return old, ldcache_merge.merge(old, entries, keep_first=keep_first)

    def _not_found_without(self, root: Root, image: bytes | None) -> list[str]:
        """Return the libraries that the loader finds neither by itself nor in *image*, a cache."""
        try:
            cached = {row[:3] for row in ldcache_merge.parse(image)} if image else set()
        except LdcacheError:
            cached = set()
        return [
            entry.path
            for entry in self.entries
            if (entry.soname, entry.path, entry.flags) not in cached
            and basename(dirname(entry.path)) not in _PLUGIN_DIRECTORIES
            and not _is_searched(root, dirname(entry.path))
        ]

    def _write_drop_in(self, root: Root, image: bytes | None, warn: Callable[[str], None]) -> None:
        """Name for ldconfig the directories that it does not scan, if there is an ldconfig."""
        if self.compat is None:
            drop_in.remove(root, drop_in.COMPAT)
        # One that it scans already must not be named: it would come before the image's others.
        names = _not_scanned(root, image, self.directories())
        if names and drop_in.has_ldconfig(root):
            drop_in.write(root, drop_in.DRIVER, names, warn)

    def _write_musl_lists(self, root: Root) -> None:
        """Add the directories to the list of each of musl's loaders that the image has."""
        for abi, architecture in _MUSL.items():
            flags = ldcache_merge.ABI_FLAGS[abi]
            paths = [e.path for e in self.entries if e.flags == flags]
            if paths and root.exists(f"/lib/ld-musl-{architecture}.so.1"):
                directories = dict.fromkeys(dirname(path) for path in paths)
                _add_to_list(root, f"ld-musl-{architecture}.path", list(directories))


def _hint(error: OSError | LdcacheError, what: str) -> str:
    """Return what to do about *error*, met where the file *what* is read or written."""
    if isinstance(error, LdcacheError) or error.errno == errno.EFBIG:
        ours = ", or run ldconfig in it" if what == CACHE else ""
        return f'remove "{what}" from the image{ours}'
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return 'make room on the file system that "/etc" of the container is on'
    return 'let "/etc" hold plain files, and mount nothing read-only over it'


def _read_cache(root: Root) -> bytes | None:
    try:
        fd = root.open_path(CACHE)
    except OSError as error:
        # A link that leads nowhere inside the container counts as none, and is replaced.
        if error.errno in LEADS_NOWHERE:
            return None
        raise
    try:
        return read_of_image(fd, CACHE, MAX_CACHE_BYTES)
    finally:
        os.close(fd)


def _build_cache(root: Root, ldconfig: str) -> bytes:
    # A module of its own: hardly any start needs it.
    from gpuruntime.system import sandbox  # noqa: PLC0415

    return sandbox.build_cache(root, ldconfig)


def _refuse_damage(root: Root, cache: bytes | None) -> None:
    """Raise LdcacheError if *cache* is damaged, and an earlier start may have done it.

    A cache that no loader can read counts as empty; but with our drop-in there, it is likely that
    there was one that had the image's libraries.
    """
    if cache is not None and drop_in.read(root, drop_in.DRIVER):
        ldcache_merge.parse(cache)


def _was_lost(root: Root, cache: bytes | None) -> bool:
    """Return whether *cache* is one of an earlier start that never reached the disk.

    File systems that delay writing then have no bytes in it, or zeros.
    """
    is_blank = cache is not None and cache[:1] in (b"", b"\0")
    return is_blank and bool(drop_in.read(root, drop_in.DRIVER))


def _write_cache(root: Root, content: bytes, *, may_cover: bool) -> bool:
    """Write the cache, or cover it where it is on a read-only mount; return whether it is written.

    Never covered where it could be written: ldconfig could not replace it, and packages that run
    ldconfig could not be installed.
    """
    try:
        etc = root.open_directory("/etc", create=True)
        try:
            replace_file(etc, basename(CACHE), content, 0o644)
        finally:
            os.close(etc)
    except OSError as error:
        if error.errno != errno.EROFS or not may_cover:
            raise
        if not mounts.cover(root, CACHE, content, 0o644):
            raise
        return False
    return True


def _not_scanned(root: Root, image: bytes | None, directories: list[str]) -> list[str]:
    """Return those of *directories* that the image's ldconfig scans by no name."""
    names = {d: _names_of(root, d) for d in directories if d not in _DEFAULT_DIRECTORIES}
    listed = ldcache_merge.listed_directories(
        image, [name for own in names.values() for name in own]
    )
    return [directory for directory, own in names.items() if listed.isdisjoint(own)]


def _is_searched(root: Root, directory: str) -> bool:
    """Return whether the image's loader searches *directory* without any cache."""
    # Its default directories depend on how it was built: it finds libc.so.6 in one of them, and
    # where /lib is no link to /usr/lib, in the twin of the other.
    twin = directory[len("/usr") :] if directory.startswith("/usr/lib") else f"/usr{directory}"
    return any(root.exists(f"{name}/libc.so.6") for name in (directory, twin))


def _is_empty(root: Root, path: str) -> bool:
    """Return whether *path* leads to an empty file of the container's root itself."""
    try:
        fd = root.open_path(path)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        is_empty = stat.S_ISREG(status.st_mode) and status.st_size == 0
        return is_empty and mount_id(fd) == root.mount_id()
    finally:
        os.close(fd)


def _names_of(root: Root, directory: str) -> list[str]:
    """Return *directory* and, where /lib is a link to usr/lib, its other name."""
    names = [directory]
    if directory.startswith("/usr/lib"):
        other = directory[len("/usr") :]
        if _is_same_directory(root, directory, other):
            names.append(other)
    return names


def _is_same_directory(root: Root, one: str, other: str) -> bool:
    identities = []
    for path in (one, other):
        try:
            fd = root.open_path(path)
        except OSError:
            return False
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        identities.append((stat.S_IFMT(status.st_mode), status.st_dev, status.st_ino))
    return identities[0] == identities[1]


def _add_to_list(root: Root, name: str, directories: list[str]) -> None:
    """Add *directories* to musl's list *name* in /etc; raise OSError."""
    etc = root.open_directory("/etc", create=True)
    try:
        listed = _listed(root, etc, name)
        missing = [directory for directory in directories if directory not in listed]
        # With an empty list nothing of the image loads: it is not ours to change that.
        if listed and missing:
            replace_file(etc, name, encode("\n".join([*listed, *missing, ""])), 0o644)
    finally:
        os.close(etc)


def _listed(root: Root, etc: int, name: str) -> list[str]:
    """Return the directories of musl's list *name* in /etc, the directory *etc*; raise OSError.

    They will be where everybody in the container can read them: nothing else, and of no volume.
    """
    try:
        fd = root.open_path(f"/etc/{name}")
    except OSError as error:
        if error.errno not in LEADS_NOWHERE:
            raise
        return list(_MUSL_DIRECTORIES)
    try:
        if mount_id(fd) not in (root.mount_id(), mount_id(etc)):
            raise SyscallError(errno.EXDEV, f'read("/etc/{name}"), a link to another mount')
        content = read_of_image(fd, f"/etc/{name}", MAX_LIST_BYTES)
    finally:
        os.close(fd)
    # Of all that may be in a name, musl takes these two for the end of one.
    listed = [d for d in decode(content).replace(":", "\n").split("\n") if d]
    if not all(directory.startswith("/") for directory in listed):
        raise SyscallError(
            errno.EINVAL, f'read("/etc/{name}"), which is not a list of directories'
        )
    return listed
