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
    from collections.abc import Callable, Iterator, Sequence
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


def _mounted(root: Root, folder: str) -> Iterator[ldcache.Entry]:
    """Yield an entry for each library that is a mount of its own in *folder*.

    The others are the image's, which its own cache has in the order that it wants.
    """
    if not update_container.is_clean(folder):
        raise RequestError(f'update-ldcache: "{folder}" is no absolute path')
    try:
        dirfd = root.open_directory(folder)
    except OSError:
        return
    try:
        ours = _mount_id(dirfd)
        for name in sorted(os.listdir(dirfd))[:MAX_NAMES]:
            if not name.startswith("lib") or ".so" not in name:
                continue
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode) and _mount_id(fd) != ours:
                    yield from _entry(fd, folder, name)
            finally:
                os.close(fd)
    finally:
        os.close(dirfd)


def _entry(fd: int, folder: str, name: str) -> Iterator[ldcache.Entry]:
    with os.fdopen(reopen(fd, os.O_RDONLY), "rb") as file:
        try:
            found = elf.read(file)
        except elf.ElfError:
            return
    soname = found.soname or name
    if found.abi in ldcache.ABI_FLAGS and update_container.is_clean(f"/{soname}"):
        yield ldcache.Entry(soname, f"{folder}/{soname}", ldcache.ABI_FLAGS[found.abi])


def _mount_id(fd: int) -> str:
    """Return which mount *fd* is in: bind mounts of one file system have one device number."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        return next(line for line in lines if line.startswith("mnt_id:"))
