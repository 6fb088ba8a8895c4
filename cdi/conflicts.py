# SPDX-License-Identifier: Apache-2.0
"""Find pairs of files that define the same devices, and the file of each pair to remove.

Two files of one directory that define the same device conflict, and the device does not resolve.
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
        """Return the conflict as one clause; the remedy is to remove *stale*."""
        return f'"{self.stale}" and "{self.kept}" both define {some(self.names)}'


def some(names: tuple[str, ...]) -> str:
    """Return *names* in short: the first one, and the number of the others."""
    remaining = len(names) - 1
    return f'"{names[0]}"' + (f" and {remaining} more" if remaining else "")


def find(files: Iterable[SpecFile], maintained: Collection[str] = ()) -> Iterator[Conflict]:
    """Yield the conflicts of *files*, pair by pair.

    The older file of a pair is the one to remove, because the newer one describes the current
    host. A file of *maintained* is kept even if it is older, because it would be written again.
    """
    loaded = [file for file in files if file.spec is not None]
    for first, second in combinations(loaded, 2):
        names = shared(first, second)
        if names:
            stale, kept = sorted(
                (first.path, second.path), key=lambda path: _rank(path, maintained)
            )
            yield Conflict(stale, kept, names)


def shared(first: SpecFile, second: SpecFile) -> tuple[str, ...]:
    """Return the qualified names, sorted, that both files define in the same directory."""
    if first.spec is None or second.spec is None or first.priority != second.priority:
        return ()
    kind = first.spec["kind"]
    if second.spec["kind"] != kind:
        return ()
    return tuple(f"{kind}={name}" for name in sorted(first.devices.keys() & second.devices.keys()))


def _rank(path: str, maintained: Collection[str]) -> tuple[bool, int, str]:
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        # The file has been removed: keep the other one.
        changed = 0
    return path in maintained, changed, path
