# SPDX-License-Identifier: Apache-2.0
"""Find where keys are in the text of a config.toml, which a TOML parser does not report; pure."""

from __future__ import annotations

import bisect
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from typing import Any

# Longer paths are cut: no option has so many parts, and a hostile file has a million.
_MAX_PARTS = 8
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{}=\n]"
    r"""|[^\s\[\]{}="'\#]+""",
    re.DOTALL,
)
_SAMPLE = re.compile(r"#[ \t]*([A-Za-z0-9_-]+)[ \t]*=")


@dataclasses.dataclass(frozen=True, slots=True)
class KeyPosition:
    """Where a path is in the text: *kind* is "table", "key", or "sample", which is a comment."""

    kind: str
    path: tuple[str, ...]
    line: int
    start: int


def lines(text: str) -> dict[tuple[str, ...], int]:
    """Return where each path of *text*, which must be TOML, is first; inline tables not."""
    found: dict[tuple[str, ...], int] = {}
    for statement in scan(text):
        if statement.kind != "sample":
            found.setdefault(statement.path, statement.line)
    return found


def line_of(path: tuple[str, ...], found: dict[tuple[str, ...], int]) -> int | None:
    """Return the line where *path*, or what it is in, is."""
    for length in range(min(len(path), _MAX_PARTS), 0, -1):
        if path[:length] in found:
            return found[path[:length]]
    # A table that only dotted headers name.
    return next((line for known, line in found.items() if known[: len(path)] == path), None)


def scan(text: str) -> Iterator[KeyPosition]:
    """Give the statements of *text*, which must be TOML, and the comments that look like one."""
    breaks = [match.start() for match in re.finditer("\n", text)]
    table: tuple[str, ...] = ()
    # The tokens of the key so far, None behind it.
    key: list[str] | None = []
    start = depth = 0
    in_header = False
    for match in _TOKEN.finditer(text):
        lexeme = match.group()
        if lexeme == "\n":
            if depth == 0:
                key, in_header = [], False
        elif lexeme.startswith("#"):
            sample = _SAMPLE.match(lexeme)
            if key == [] and sample and depth == 0:
                line = bisect.bisect_left(breaks, match.start()) + 1
                yield KeyPosition("sample", (*table, sample.group(1)), line, match.start())
        elif key is None:
            depth += (lexeme in "[{") - (lexeme in "]}")
        elif lexeme == "[" and (in_header or not key):
            in_header, start = True, match.start()
        elif lexeme == "=" or (lexeme == "]" and in_header):
            path = _path("".join(key))
            if in_header:
                table = path
            else:
                path = (*table, *path)[:_MAX_PARTS]
            line = bisect.bisect_left(breaks, start) + 1
            yield KeyPosition("table" if in_header else "key", path, line, start)
            # The second bracket of an array's header must not count.
            key, depth = None, int(in_header and text[match.end() : match.end() + 1] == "]")
        else:
            if not key and not in_header:
                start = match.start()
            key.append(lexeme)


def _path(key: str) -> tuple[str, ...]:
    if '"' not in key and "'" not in key:
        return tuple(key.split(".", _MAX_PARTS)[:_MAX_PARTS])
    path: list[str] = []
    value: Any = tomllib.loads(f"{key} = 0")
    while isinstance(value, dict) and len(path) < _MAX_PARTS:
        ((part, value),) = value.items()
        path.append(part)
    return tuple(path)
