# SPDX-License-Identifier: Apache-2.0
"""Find the line of a key in the text of a config.toml; pure."""

from __future__ import annotations

import bisect
import re

from gpuruntime.formats import toml_source
from gpuruntime.formats.toml_source import Path


def lines(text: str) -> dict[Path, int]:
    """Return the first line of each path of the TOML *text*, except for keys of inline tables."""
    breaks = [match.start() for match in re.finditer("\n", text)]
    first: dict[Path, int] = {}
    for statement in toml_source.scan(text):
        if statement.kind != "sample":
            line = bisect.bisect_left(breaks, statement.start) + 1
            first.setdefault(statement.path, line)
    return first


def line_of(path: Path, places: dict[Path, int]) -> int | None:
    """Return the line of *path*, or of the nearest table around it; None if *places* has none."""
    for length in range(len(path), 0, -1):
        if path[:length] in places:
            return places[path[:length]]
    # A table that only the headers of its subtables name.
    return next((line for other, line in places.items() if other[: len(path)] == path), None)
