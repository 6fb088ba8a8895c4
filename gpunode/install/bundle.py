# SPDX-License-Identifier: Apache-2.0
"""The tree that `make bundle` makes: its version, its digest, and copies of it.

It is read through a descriptor, because the root directory of this process becomes the host's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from gpunode.install.errors import InstallError

# Below the tree.
RUNTIME = "bin/gpu-container-runtime"
_VERSION_FILE = "lib/gpuruntime/gpuruntime/__init__.py"
_VERSION = re.compile(rb'^__version__ = "([0-9A-Za-z.+-]{1,64})"$', re.MULTILINE)
_CHUNK_BYTES = 1 << 20
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file, directory or symlink of a tree, by its path in the tree."""

    path: str
    mode: int
    target: str = ""

    @property
    def permissions(self) -> int:
        """The mode of a copy: nobody but its owner may write to it."""
        return stat.S_IMODE(self.mode) & 0o755


def open_tree(path: str) -> int:
    """Return a descriptor of the bundle in the directory *path*; raise InstallError."""
    try:
        tree = os.open(path, _DIRECTORY_FLAGS)
    except OSError as error:
        raise InstallError(
            f'cannot read the bundle "{path}": {error.strerror}',
            "name the directory of an unpacked bundle: --bundle",
        ) from error
    try:
        os.stat(RUNTIME, dir_fd=tree)
        os.stat(_VERSION_FILE, dir_fd=tree)
    except OSError as error:
        os.close(tree)
        raise InstallError(
            f'"{path}" is not a bundle: it has no "{RUNTIME}" or no "{_VERSION_FILE}"',
            'name the directory of an unpacked bundle, which "make bundle" makes: --bundle',
        ) from error
    return tree


def name_of(tree: int) -> str:
    """Return the name of the directory for *tree*: its version and its digest."""
    with open(_open(_VERSION_FILE, tree), "rb") as stream:
        matched = _VERSION.search(stream.read(_CHUNK_BYTES))
    if matched is None:
        raise InstallError(
            f'"{_VERSION_FILE}" of the bundle names no version', "make the bundle again"
        )
    return f"{matched[1].decode()}-{digest_of(tree)[:12]}"


def digest_of(tree: int) -> str:
    """Return the digest of all paths, modes and contents of *tree*; raise InstallError."""
    digest = hashlib.sha256()
    for entry in _entries(tree):
        digest.update(f"{entry.path}\0{entry.permissions:o}\0{entry.target}\0".encode())
        if stat.S_ISREG(entry.mode):
            with open(_open(entry.path, tree), "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def copy(tree: int, directory: str) -> None:
    """Copy *tree* to *directory*, which must not exist; raise OSError."""
    os.mkdir(directory, 0o755)
    for entry in _entries(tree):
        path = f"{directory}/{entry.path}"
        if stat.S_ISDIR(entry.mode):
            os.mkdir(path)
        elif stat.S_ISLNK(entry.mode):
            os.symlink(entry.target, path)
        else:
            with open(_open(entry.path, tree), "rb") as source, open(path, "xb") as copied:
                shutil.copyfileobj(source, copied, _CHUNK_BYTES)
        if not stat.S_ISLNK(entry.mode):
            # Not by mkdir and open, whose modes the umask would change.
            os.chmod(path, entry.permissions)


def _entries(tree: int) -> Iterator[_Entry]:
    """Yield what is in *tree*, directories before their content, sorted by name."""
    for top, directories, names, directory in os.fwalk(".", dir_fd=tree):
        directories.sort()
        for name in sorted((*directories, *names)):
            path = os.path.normpath(f"{top}/{name}")
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                yield _Entry(path, mode, _link(path, name, directory))
            elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                yield _Entry(path, mode)
            else:
                raise InstallError(
                    f'"{path}" of the bundle is neither a file, a directory nor a symlink',
                    "make the bundle again",
                )


def _link(path: str, name: str, directory: int) -> str:
    """Return the target of a symlink, which must be in the tree."""
    target = os.readlink(name, dir_fd=directory)
    resolved = os.path.normpath(f"{os.path.dirname(path)}/{target}")
    if target.startswith("/") or resolved.split("/")[0] == "..":
        raise InstallError(
            f'the symlink "{path}" of the bundle leads out of it', "make the bundle again"
        )
    return target


def _open(path: str, tree: int) -> int:
    return os.open(path, _FILE_FLAGS, dir_fd=tree)
