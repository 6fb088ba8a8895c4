# SPDX-License-Identifier: Apache-2.0
"""The versions of the runtime on a host: a directory for each, and a symlink to the current one.

A switch replaces the symlink by one rename. The version before stays, because containers that were
created with it name its hook, and so does every version that a CDI spec of the host names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection

from gpunode.install import bundle
from gpunode.install.errors import InstallError

CURRENT = "current"
VERSIONS = "versions"
# In the directory of the versions, and beside the symlink.
_NEW = ".new"
_OLD = ".old"
SPEC_DIRECTORIES = ("/etc/cdi", "/run/cdi", "/var/run/cdi")
_MAX_SPEC_BYTES = 16 << 20


class Versions:
    """The versions below the directory *top* of the host."""

    def __init__(self, top: str) -> None:
        self.top = top
        self.directory = f"{top}/{VERSIONS}"
        self.link = f"{top}/{CURRENT}"

    def current(self) -> str:
        """Return the name of the version in use, "" without one."""
        try:
            return os.path.basename(os.readlink(self.link))
        except FileNotFoundError:
            return ""

    def add(self, tree: int, name: str) -> bool:
        """Copy the bundle *tree* as the version *name*; return whether it was missing or damaged.

        The directory gets its name when it is complete and on the disk. Raises OSError.
        """
        os.makedirs(self.directory, 0o755, exist_ok=True)
        self._remove_leftovers()
        final = f"{self.directory}/{name}"
        if os.path.isdir(final) and _digest(final) == bundle.digest_of(tree):
            return False
        bundle.copy(tree, f"{self.directory}/{_NEW}")
        os.sync()
        if os.path.lexists(final):
            os.rename(final, f"{self.directory}/{_OLD}")
        os.rename(f"{self.directory}/{_NEW}", final)
        self._remove_leftovers()
        return True

    def switch(self, name: str) -> bool:
        """Make *name* the current version; return whether another was; raise OSError."""
        target = f"{VERSIONS}/{name}"
        if os.path.islink(self.link) and os.readlink(self.link) == target:
            return False
        new = f"{self.top}/{_NEW}"
        if os.path.lexists(new):
            os.unlink(new)
        os.symlink(target, new)
        os.rename(new, self.link)
        return True

    def prune(self, kept: Collection[str]) -> list[str]:
        """Remove the versions that are not *kept* and that no CDI spec names; return them."""
        texts = _specs()
        removed = []
        for name in sorted(os.listdir(self.directory)):
            if name in kept or any(f"/{name}/".encode() in text for text in texts):
                continue
            shutil.rmtree(f"{self.directory}/{name}")
            removed.append(name)
        return removed

    def remove(self) -> None:
        """Remove the symlink and all versions; raise OSError."""
        for path in (self.link, f"{self.top}/{_NEW}"):
            if os.path.lexists(path):
                os.unlink(path)
        if os.path.isdir(self.directory):
            shutil.rmtree(self.directory)

    def _remove_leftovers(self) -> None:
        """Remove what an interrupted call has left."""
        for name in (_NEW, _OLD):
            path = f"{self.directory}/{name}"
            if os.path.lexists(path):
                shutil.rmtree(path)


def _digest(directory: str) -> str:
    """Return the digest of an installed version, "" if it is not one any more."""
    tree = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return bundle.digest_of(tree)
    except InstallError:
        return ""
    finally:
        os.close(tree)


def _specs() -> list[bytes]:
    """Return the content of the CDI specs of the host."""
    texts = []
    for directory in SPEC_DIRECTORIES:
        if not os.path.isdir(directory):
            continue
        for entry in os.scandir(directory):
            if entry.name.endswith((".json", ".yaml")) and entry.is_file():
                with open(entry.path, "rb") as stream:
                    texts.append(stream.read(_MAX_SPEC_BYTES))
    return texts
