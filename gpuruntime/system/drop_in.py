# SPDX-License-Identifier: Apache-2.0
"""Our files in a container's /etc/ld.so.conf.d: what its own ldconfig scans first.

On the start path. Each file has one fixed name, so that a restarted container does not collect
them.
"""

from __future__ import annotations

import errno
import posix as os

from cdi.pathnames import normpath
from gpuruntime.system import clean_names
from gpuruntime.system.paths import Root, file_content, list_names, read_of_image
from gpuruntime.system.replace import remove_name, replace_file
from gpuruntime.system.text import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAIN = "/etc/ld.so.conf"
DIRECTORY = "/etc/ld.so.conf.d"
DRIVER = "00-gpuruntime.conf"
# Before the driver's.
COMPAT = "00-compat-gpuruntime.conf"
HEADS = {
    DRIVER: b"# Written at container start: where the GPU driver's libraries are.\n",
    COMPAT: b"# Written at container start: the image's CUDA, newer than the host's driver.\n",
}
INCLUDE = b"include /etc/ld.so.conf.d/*.conf\n"
MAX_CONF_BYTES = 1 << 20
_MAX_FILES = 4096
_MAX_KEPT_FILES = 16
_MAX_KEPT_BYTES = 64 << 10


def write(root: Root, name: str, directories: Sequence[str], warn: Callable[[str], None]) -> None:
    """Make the file *name* list *directories*, if it does not already; raise OSError."""
    _write_main(root, warn)
    content = HEADS[name] + b"".join(encode(d) + b"\n" for d in directories)
    dirfd = root.open_directory(DIRECTORY, create=True)
    try:
        if file_content(dirfd, name, MAX_CONF_BYTES) != content:
            replace_file(dirfd, name, content, 0o644)
    finally:
        os.close(dirfd)


def remove(root: Root, name: str) -> None:
    """Remove the file *name* of an earlier start, if there is one of ours; raise OSError."""
    try:
        dirfd = root.open_directory(DIRECTORY)
    except OSError:
        return
    try:
        if (file_content(dirfd, name, MAX_CONF_BYTES) or b"").startswith(HEADS[name]):
            remove_name(dirfd, name)
    finally:
        os.close(dirfd)


def read(root: Root, name: str) -> list[str]:
    """Return the directories that our file *name* lists."""
    try:
        dirfd = root.open_directory(DIRECTORY)
    except OSError:
        return []
    try:
        content = file_content(dirfd, name, _MAX_KEPT_BYTES) or b""
    finally:
        os.close(dirfd)
    return _directories(content) if content.startswith(HEADS[name]) else []


def listed_before(root: Root) -> list[str]:
    """Return the directories that files of the image list which sort before ours.

    Its ldconfig scans them first: an image that has CUDA of its own may want that.
    """
    try:
        dirfd = root.open_directory(DIRECTORY)
    except OSError:
        return []
    try:
        names = [
            name
            for name in list_names(dirfd, _MAX_FILES)
            if name < DRIVER and name != COMPAT and name.endswith(".conf")
        ]
        contents = [file_content(dirfd, name, _MAX_KEPT_BYTES) for name in names[:_MAX_KEPT_FILES]]
    except OSError:
        # So many that it is no image's.
        return []
    finally:
        os.close(dirfd)
    return [d for content in contents for d in _directories(content or b"")]


def has_ldconfig(root: Root) -> bool:
    """Return whether somebody in the container can read our files."""
    return root.exists("/etc/ld.so.conf") or _has_program(root)


def _has_program(root: Root) -> bool:
    return root.exists("/sbin/ldconfig") or root.exists("/usr/sbin/ldconfig")


def _directories(content: bytes) -> list[str]:
    lines = content.decode("utf-8", "replace").splitlines()
    return [line.strip() for line in lines if clean_names.is_clean(line.strip())]


def _write_main(root: Root, warn: Callable[[str], None]) -> None:
    """See that /etc/ld.so.conf includes our directory: without it, ours is read by nobody.

    What cannot be read is a warning: until the container's own ldconfig runs, which may be never,
    its loader finds all by the cache.
    """
    later = "after its own ldconfig has run, the driver"
    try:
        content = _main_content(root)
    except OSError as error:
        why = error.strerror or str(error)
        warn(f'"{MAIN}" in the container cannot be read ({why}): {later} may not be found')
        return
    if content is not None:
        if not _includes_directory(content):
            warn(f'"{MAIN}" in the container does not include "{DIRECTORY}": {later} is not found')
        return
    if not _has_program(root):
        return
    etc = root.open_directory("/etc", create=True)
    try:
        # Whole or not at all, and in place of a link that leads nowhere.
        replace_file(etc, "ld.so.conf", INCLUDE, 0o644)
    finally:
        os.close(etc)


def _main_content(root: Root) -> bytes | None:
    """Return what /etc/ld.so.conf holds, None if there is none; raise OSError."""
    try:
        fd = root.open_path(MAIN)
    except OSError as error:
        # Errors of openat2 have a number, and no class of their own.
        if error.errno == errno.ENOENT:
            return None
        raise
    try:
        return read_of_image(fd, MAIN, MAX_CONF_BYTES)
    finally:
        os.close(fd)


def _includes_directory(content: bytes) -> bool:
    """Return whether a line of the main file *content* seems to include our files."""
    for line in content.splitlines():
        words = line.partition(b"#")[0].split()
        if words[:1] == [b"include"] and any(map(_has_ours, words[1:])):
            return True
    return False


def _has_ours(pattern: bytes) -> bool:
    """Return whether *pattern* of an include has all our files.

    Of glob(7) only the star is known; whoever uses more is warned without need.
    """
    path = pattern if pattern.startswith(b"/") else b"/etc/" + pattern
    directory, _, name = path.rpartition(b"/")
    first, *rest = name.split(b"*")
    if normpath(decode(directory)) != DIRECTORY:
        return False
    return all(_fits(ours.encode(), first, rest) for ours in HEADS)


def _fits(name: bytes, first: bytes, rest: list[bytes]) -> bool:
    """Return whether *name* is *first* and then each of *rest* behind whatever there is."""
    if not rest:
        return name == first
    at = len(first)
    for part in rest[:-1]:
        at = name.find(part, at) + len(part)
        if at < len(part):
            return False
    return name.startswith(first) and name.endswith(rest[-1]) and len(name) - len(rest[-1]) >= at
