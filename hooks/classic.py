# SPDX-License-Identifier: Apache-2.0
"""The incumbent's hooks, one a step, for specs that have them: arguments → operations.

Loaded only when such a hook is asked for. What it finds out below the container's root it reads
through descriptors, as everything else.
"""

from __future__ import annotations

import os
import stat

from gpuruntime import elf, ldcache
from gpuruntime.errors import RequestError
from gpuruntime.record import Record
from gpuruntime.system.ops import LoaderCache, MaskParams
from gpuruntime.system.paths import reopen
from hooks import update_container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Union

    from gpuruntime.system.paths import Root

    Operation = Union[update_container.Operation, "MountedLibraries"]

MAX_NAMES = 100_000


def plan(name: str, arguments: Sequence[str]) -> list[Operation]:
    """Return the operations of the hook *name*, one of `entry.CLASSIC`; raise RequestError.

    create-symlinks --link TARGET::LINK…
    update-ldcache [--ldconfig-path PATH] --folder FOLDER…    (no ldconfig is run)
    disable-device-node-modification
    """
    folders: list[str] = []
    links: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            value = next(words, "")
        if name == "create-symlinks" and option == "--link":
            links += ["--link", value]
        elif name == "update-ldcache" and option == "--folder":
            folders.append(value)
        elif name != "update-ldcache" or option != "--ldconfig-path":
            raise RequestError(
                f'{name}: "{word}" is no option',
                'write the CDI spec again with "gpuruntime cdi generate"',
            )
    if name == "update-ldcache":
        return [MountedLibraries(tuple(dict.fromkeys(folders)))]
    if name == "create-symlinks":
        return [*update_container.plan(links)]
    return [MaskParams()]


class MountedLibraries(Record):
    """Let the container's loader find the libraries that are mounted into *folders*."""

    __slots__ = ("folders",)

    def __init__(self, folders: tuple[str, ...]) -> None:
        self.folders = folders

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"add the libraries mounted in {', '.join(self.folders)} to /etc/ld.so.cache"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*; raise LdcacheError as `LoaderCache`."""
        entries = [entry for folder in self.folders for entry in _mounted(root, folder)]
        if entries:
            LoaderCache(tuple(entries)).execute(root, warn)


def _mounted(root: Root, folder: str) -> list[ldcache.Entry]:
    """Return an entry for each library that is a mount of its own in *folder*, and its `.so` link.

    The others are the image's, which its own cache has in the order that it wants.
    """
    if not update_container.is_clean(folder):
        raise RequestError(f'update-ldcache: "{folder}" is no absolute path')
    try:
        dirfd = root.open_directory(folder)
    except OSError:
        return []
    found: dict[str, ldcache.Entry] = {}
    links = []
    try:
        ours = _mount_id(dirfd)
        for name in sorted(os.listdir(dirfd))[:MAX_NAMES]:
            if not name.startswith("lib") or ".so" not in name:
                continue
            try:
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd)
            except OSError:
                # Gone meanwhile: it is not a mount, which cannot be removed.
                continue
            try:
                kind = stat.S_IFMT(os.fstat(fd).st_mode)
                if kind == stat.S_IFREG and _mount_id(fd) != ours:
                    entry = _entry(fd, folder, name)
                    if entry is not None:
                        found[entry.soname] = entry
                elif kind == stat.S_IFLNK and name.endswith(".so"):
                    links.append((name, os.readlink("", dir_fd=fd)))
            finally:
                os.close(fd)
    finally:
        os.close(dirfd)
    named = [
        ldcache.Entry(name, f"{folder}/{name}", found[target].flags)
        for name, target in links
        if target in found and update_container.is_clean(f"/{name}")
    ]
    return [*found.values(), *named]


def _entry(fd: int, folder: str, name: str) -> ldcache.Entry | None:
    with os.fdopen(reopen(fd, os.O_RDONLY), "rb") as file:
        try:
            found = elf.read(file)
        except elf.ElfError:
            return None
    soname = found.soname or name
    if found.abi not in ldcache.ABI_FLAGS or not update_container.is_clean(f"/{soname}"):
        return None
    return ldcache.Entry(soname, f"{folder}/{soname}", ldcache.ABI_FLAGS[found.abi])


def _mount_id(fd: int) -> str:
    """Return which mount *fd* is in: bind mounts of one file system have one device number."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        return next(line for line in lines if line.startswith("mnt_id:"))
