# SPDX-License-Identifier: Apache-2.0
"""Which strings may be names in a container; pure.

On the start path. No other string reaches ld.so.conf, a link or the loader cache, wherever it
comes from.
"""

from __future__ import annotations

MAX_PATH_CHARS = 4095
MAX_NAME_CHARS = 255
# The characters of a path, as a set: to compile a regular expression costs more than all checks.
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.+~@-/")
# The by-path names of device nodes have colons, which separate directories in ld.so.conf.
LINK_PATH = _PLAIN | {":"}
_NO_NAMES = frozenset(("", ".", ".."))


def is_clean(path: str, characters: frozenset[str] = _PLAIN) -> bool:
    """Return whether *path* is absolute, and of names that nothing in its way takes for more."""
    first, *parts = path.split("/")
    return (
        not first
        and len(path) <= MAX_PATH_CHARS
        and characters.issuperset(path)
        and bool(parts)
        and _NO_NAMES.isdisjoint(parts)
    )


def is_clean_name(name: str) -> bool:
    """Return whether *name* is that of a file, and nothing takes it for more."""
    return len(name) <= MAX_NAME_CHARS and "/" not in name and is_clean(f"/{name}")
