# SPDX-License-Identifier: Apache-2.0
"""Take paths apart as `posixpath` does, without importing it; pure.

On the start path: `posixpath` imports `os`, which costs a quarter of the interpreter's own start.
The system calls come from `posix`. A test compares these functions with the standard library's.
"""

from __future__ import annotations


def split(path: str) -> tuple[str, str]:
    """Return directory and name of *path*."""
    directory, slash, name = path.rpartition("/")
    # If the directory consists of slashes only, it keeps them all.
    return directory.rstrip("/") or directory + slash, name


def dirname(path: str) -> str:
    """Return the directory of *path*."""
    return split(path)[0]


def basename(path: str) -> str:
    """Return the name of *path* in its directory."""
    return path.rpartition("/")[2]


def join(directory: str, name: str) -> str:
    """Return the path of *name* in *directory*."""
    if name.startswith("/") or not directory:
        return name
    return directory + name if directory.endswith("/") else f"{directory}/{name}"


def normpath(path: str) -> str:
    """Return *path* without empty parts, `.` and `..`, as if no directory were a symlink.

    Two leading slashes are kept, because POSIX allows a special meaning for them.
    """
    if not path:
        return "."
    root = "/" if path.startswith("/") else ""
    if path.startswith("//") and not path.startswith("///"):
        root = "//"
    parts: list[str] = []
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if part != ".." or (not root and (not parts or parts[-1] == "..")):
            parts.append(part)
        elif parts:
            parts.pop()
    return root + "/".join(parts) or "."
