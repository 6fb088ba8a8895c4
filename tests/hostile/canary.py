# SPDX-License-Identifier: Apache-2.0
"""What is outside of a root and must stay as it is, down to times and link counts."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path


def digest(tree: Path, *without: Path) -> dict[str, tuple[object, ...]]:
    """Return, by name, content, mode, owner, identity, link count and mtime of all in *tree*.

    What is below a path in *without*, and these themselves, are left out.
    """
    seen: dict[str, tuple[object, ...]] = {}
    for path in sorted((tree, *tree.rglob("*"))):
        if any(left in (path, *path.parents) for left in without):
            continue
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        seen[str(path)] = (
            content, status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_nlink,
            status.st_mtime_ns,
        )  # fmt: skip
    return seen
