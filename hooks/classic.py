# SPDX-License-Identifier: Apache-2.0
"""The incumbent's hooks, one for each step, for specs that have them: arguments → operations.

Loaded only for such a hook. What it reads below the container's root, it reads through
descriptors, as everything else.
"""

from __future__ import annotations

import errno
import os
import stat

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import elf, ldcache_merge
from gpuruntime.system import drop_in
from gpuruntime.system.clean_names import LINK_PATH, MAX_PATH_CHARS, is_clean, is_clean_name
from gpuruntime.system.compat import DEFAULT_ROOT, CompatInUse, CudaCompat
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.operation import Operation
from gpuruntime.system.ops import ApplicationProfile, Chmod, Link, MaskParams
from gpuruntime.system.paths import list_names, mount_id, reopen
from hooks.options import last, parse, parse_mode, refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from cdi.wire import OciConfig
    from gpuruntime.system.paths import Root
    from hooks.options import OptionValues

CREATE_SYMLINKS = "create-symlinks"
UPDATE_LDCACHE = "update-ldcache"
ENABLE_CUDA_COMPAT = "enable-cuda-compat"
CHMOD = "chmod"
# Hook → its options that have a value.
OPTIONS: dict[str, tuple[str, ...]] = {
    CREATE_SYMLINKS: ("link",),
    ENABLE_CUDA_COMPAT: (
        "host-driver-version",
        "host-cuda-version",
        "cuda-compat-container-root",
    ),
    UPDATE_LDCACHE: ("folder", "ldconfig-path"),
    "disable-device-node-modification": (),
    "update-application-profile": (),
    CHMOD: ("mode", "path"),
    "noop": (),
}
MAX_NAMES = 100_000
# Hooks that decide on the image's CUDA, by a word of their arguments.
_COMPAT_WORDS = frozenset((ENABLE_CUDA_COMPAT, "--cuda-compat"))


def read(name: str, arguments: Sequence[str]) -> OptionValues:
    """Return the options in *arguments* of the hook *name*; raise RequestError.

    create-symlinks --link TARGET::LINK…
    update-ldcache [--ldconfig-path PATH] --folder FOLDER…    (no ldconfig is run)
    enable-cuda-compat [--host-driver-version V] [--host-cuda-version V]
                       [--cuda-compat-container-root DIRECTORY]
    disable-device-node-modification
    update-application-profile
    chmod --mode OCTAL --path PATH…
    noop

    A list may also be one value with commas.
    """
    return parse(name, arguments, OPTIONS[name])


def plan(name: str, option_values: OptionValues) -> list[Operation]:
    """Return the operations of the hook *name*, one of `OPTIONS`; raise RequestError."""
    if name == CREATE_SYMLINKS:
        return [_link(value) for value in dict.fromkeys(_list(option_values, "link"))]
    if name == UPDATE_LDCACHE:
        return _update_ldcache(option_values)
    if name == ENABLE_CUDA_COMPAT:
        return _enable_cuda_compat(option_values)
    if name == CHMOD:
        return _chmod(option_values)
    if name == "disable-device-node-modification":
        return [MaskParams()]
    return [ApplicationProfile()] if name == "update-application-profile" else []


def _list(option_values: OptionValues, name: str) -> list[str]:
    return [part for value in option_values.get(name, ()) for part in value.split(",")]


def _link(value: str) -> Link:
    target, separator, path = value.partition("::")
    path = path if path.startswith("/") else f"/{path}"
    # The target is text for the container alone: nobody here looks up where it leads.
    is_text = 0 < len(target) <= MAX_PATH_CHARS and LINK_PATH.issuperset(target)
    if not (separator and is_text and is_clean(path, LINK_PATH)) or "::" in path:
        raise refused(CREATE_SYMLINKS, value, "is not TARGET::LINK, two plain paths")
    return Link(path, target)


def _update_ldcache(option_values: OptionValues) -> list[Operation]:
    if not last(option_values, "ldconfig-path", "/sbin/ldconfig"):
        raise refused(UPDATE_LDCACHE, "", "is not the path of an ldconfig")
    folders = list(dict.fromkeys(_list(option_values, "folder")))
    for folder in folders:
        if not is_clean(folder):
            raise refused(UPDATE_LDCACHE, folder, "is not a plain absolute path")
    return [MountedLibraries(tuple(folders))]


def _enable_cuda_compat(option_values: OptionValues) -> list[Operation]:
    driver, cuda = (
        last(option_values, "host-driver-version"),
        last(option_values, "host-cuda-version"),
    )
    if not driver and not cuda:
        return []
    for version in filter(None, (driver, cuda)):
        if not is_clean_name(version):
            raise refused(ENABLE_CUDA_COMPAT, version, "is not a version")
    directory = last(option_values, "cuda-compat-container-root", DEFAULT_ROOT)
    if not is_clean(directory):
        raise refused(ENABLE_CUDA_COMPAT, directory, "is not a plain absolute path")
    return [CudaCompat(driver, cuda, directory)]


def _chmod(option_values: OptionValues) -> list[Operation]:
    mode, places = parse_mode(last(option_values, "mode")), _list(option_values, "path")
    if mode is None:
        raise refused(CHMOD, last(option_values, "mode"), "is not a mode, an octal number")
    for path in places or [""]:
        if not is_clean(path):
            raise refused(CHMOD, path, "is not a plain absolute path")
    return [Chmod(path, mode) for path in dict.fromkeys(places)]


class MountedLibraries(Operation):
    """Let the container's loader find the libraries that are mounted into *folders*.

    *with_compat*: the image's CUDA comes first, where an earlier hook of this start found it to
    be right. Without such a hook, what an earlier start of the container found does not count.
    """

    __slots__ = ("folders", "with_compat")

    def __init__(self, folders: tuple[str, ...], *, with_compat: bool = True) -> None:
        self.folders = folders
        self.with_compat = with_compat

    def for_config(self, document: OciConfig) -> MountedLibraries:
        """Return the operation for a container that has the hooks of *document*."""
        return MountedLibraries(self.folders, with_compat=_has_compat_hook(document))

    def describe(self) -> str:
        """Return the operation in one line."""
        return f"add the libraries mounted in {', '.join(self.folders)} to /etc/ld.so.cache"

    def execute(self, root: Root, warn: Callable[[str], None]) -> None:
        """Carry it out below *root*; raise LdcacheError as `LoaderCache`."""
        entries = [entry for folder in self.folders for entry in _mounted(root, folder)]
        compat = CompatInUse() if self.with_compat else None
        # Without entries, what is there of an earlier start goes.
        if entries or (compat.apply(root, warn) if compat else drop_in.read(root, drop_in.COMPAT)):
            LoaderCache(tuple(entries), compat).execute(root, warn)


def _has_compat_hook(document: OciConfig) -> bool:
    """Return whether a hook of *document* decides on the image's CUDA at each start."""
    # What the bundle's reader does not know, as a stage of later runtimes, can be anything.
    stages = (document.get("hooks") or {}).values()
    hooks = [hook for stage in stages if isinstance(stage, list) for hook in stage]
    return any(
        isinstance(hook, dict)
        and isinstance(hook.get("args"), list)
        and not _COMPAT_WORDS.isdisjoint(filter(_is_text, hook["args"]))
        for hook in hooks
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _mounted(root: Root, folder: str) -> list[ldcache_merge.CacheEntry]:
    """Return an entry for each library that is a mount of its own in *folder*, and its `.so` link.

    The others are the image's, which its own cache has in the order that it wants.
    """
    try:
        dirfd = root.open_directory(folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise _unreadable(folder, error) from error
    entries: dict[str, ldcache_merge.CacheEntry] = {}
    links = []
    try:
        ours = mount_id(dirfd)
        names = _names(dirfd, folder)
        for name in names:
            if not name.startswith("lib") or ".so" not in name:
                continue
            try:
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd)
            except OSError:
                # Gone meanwhile: it is not a mount, which cannot be removed.
                continue
            try:
                kind = stat.S_IFMT(os.fstat(fd).st_mode)
                if kind == stat.S_IFREG and mount_id(fd) != ours:
                    entry = _entry(fd, folder, name, names)
                    if entry is not None:
                        entries[entry.soname] = entry
                elif kind == stat.S_IFLNK and name.endswith(".so"):
                    links.append((name, os.readlink("", dir_fd=fd)))
            finally:
                os.close(fd)
    finally:
        os.close(dirfd)
    named = [
        ldcache_merge.CacheEntry(name, f"{folder}/{name}", entries[target].flags)
        for name, target in links
        if target in entries and is_clean(f"/{name}")
    ]
    return [*entries.values(), *named]


def _names(dirfd: int, folder: str) -> list[str]:
    try:
        return list_names(dirfd, MAX_NAMES)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: str, error: OSError) -> LdcacheError:
    return LdcacheError(
        f'cannot look for libraries in "{folder}" of the container: {error}',
        "let the directory have the files of an image, and be readable",
    )


def _entry(
    fd: int, folder: str, name: str, names: Collection[str]
) -> ldcache_merge.CacheEntry | None:
    try:
        with os.fdopen(reopen(fd, os.O_RDONLY), "rb") as file:
            library = elf.read(file)
    except (elf.ElfError, PermissionError):
        return None
    except OSError as error:
        raise _unreadable(folder, error) from error
    soname = library.soname or name
    if library.abi not in ldcache_merge.ABI_FLAGS or not is_clean(f"/{soname}"):
        return None
    # Where nothing has that name, the container's own ldconfig would make a link to this.
    place = soname if soname in names else name
    return ldcache_merge.CacheEntry(
        soname, f"{folder}/{place}", ldcache_merge.ABI_FLAGS[library.abi]
    )
