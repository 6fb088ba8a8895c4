# SPDX-License-Identifier: Apache-2.0
"""Write values, keys and tables as TOML; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Path = tuple[str, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def render(document: Mapping[str, Any]) -> str:
    """Return *document* as text: keys sorted, tables indented, like the engines' own tools."""
    return "".join(render_table((), document, 0)).lstrip("\n")


def literal(value: Any) -> str:  # noqa: ANN401 (any TOML value)
    """Return *value* as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escaped(character) for character in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{key_text((key,))} = {literal(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (int, float)):
        return repr(value)
    # A date or a time.
    return str(value)


def key_text(path: Path) -> str:
    """Return *path* as a dotted key."""
    return ".".join(part if _BARE.fullmatch(part) else literal(part) for part in path)


def render_table(path: Path, table: Mapping[str, Any], depth: int, unit: int = 2) -> Iterable[str]:
    """Yield the lines of *table*: its header, its keys, its tables."""
    keys = sorted(key for key, value in table.items() if not isinstance(value, dict))
    tables = sorted(key for key, value in table.items() if isinstance(value, dict))
    margin = " " * unit * max(depth - 1, 0)
    if path:
        yield f"\n{margin}[{key_text(path)}]\n"
    indent = " " * unit * depth
    for key in keys:
        yield f"{indent}{key_text((key,))} = {literal(table[key])}\n"
    for key in tables:
        yield from render_table((*path, key), table[key], depth + 1, unit)


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character < " " or character == "\x7f":
        return f"\\u{ord(character):04x}"
    return character
