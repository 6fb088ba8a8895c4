# SPDX-License-Identifier: Apache-2.0
"""Name pairs of files that take devices from each other, and which of the two to remove.

Two files of one directory that define the same device conflict, and it resolves nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from cdi.registry import SpecFile


class Conflict(NamedTuple):
    """Two files of one directory that define the devices *names*; *stale* is the one to remove."""

    stale: str
    kept: str
    names: tuple[str, ...]

    def text(self) -> str:
        """Return in one clause what is wrong; the remedy is to remove *stale*."""
        return f'"{self.stale}" and "{self.kept}" both define {some(self.names)}'


def some(names: tuple[str, ...]) -> str:
    """Return *names* in short: the first, and how many there are besides."""
    others = len(names) - 1
    return f'"{names[0]}"' + (f" and {others} more" if others else "")


def find(files: Iterable[SpecFile], maintained: Collection[str] = ()) -> Iterator[Conflict]:
    """Yield the conflicts of *files*, pair by pair.

    Of two files the older is the one to remove: the newer has what the host has now. A file of
    *maintained* is kept all the same, because something would write it again.
    """
    loaded = [file for file in files if file.spec is not None]
    for one, other in combinations(loaded, 2):
        names = shared(one, other)
        if names:
            stale, kept = sorted((one.path, other.path), key=lambda path: _rank(path, maintained))
            yield Conflict(stale, kept, names)


def shared(one: SpecFile, other: SpecFile) -> tuple[str, ...]:
    """Return the qualified names, sorted, that both files define in the same directory."""
    if one.spec is None or other.spec is None or one.priority != other.priority:
        return ()
    kind = one.spec["kind"]
    if other.spec["kind"] != kind:
        return ()
    return tuple(f"{kind}={name}" for name in sorted(one.devices.keys() & other.devices.keys()))


def _rank(path: str, maintained: Collection[str]) -> tuple[bool, int, str]:
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        # Gone since: then there is nothing to keep.
        changed = 0
    return path in maintained, changed, path
