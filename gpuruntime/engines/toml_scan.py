# SPDX-License-Identifier: Apache-2.0
"""Find where statements are in the text of a TOML file, which a parser does not report; pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

Path = tuple[str, ...]

# What a value or a header is made of, as far as finding its end needs it.
TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[\[\]{},=\n]"
    r"|[ \t\r]+"
    r"""|[^\s\[\]{},="'\#]+""",
    re.DOTALL,
)


class Statement(NamedTuple):
    """A header (*is_table*) or a key with its value: the span of its lines and of its value."""

    path: Path
    start: int
    end: int
    value: int
    value_end: int
    is_table: bool


def scan(text: str) -> Iterator[Statement]:
    """Give the statements of *text*, which must be TOML, in order; items of [[tables]] not."""
    table: Path | None = ()
    tokens = list(TOKEN.finditer(text))
    index = 0
    while index < len(tokens):
        word = tokens[index].group()
        if word.startswith("#") or word.isspace():
            index += 1
            continue
        first = index
        line = text.rfind("\n", 0, tokens[first].start()) + 1
        if word == "[":
            last = _end_of_line(tokens, index)
            header = text[tokens[first].start() : tokens[last - 1].end()]
            table = None if header.startswith("[[") else _path(header)
            if table is not None:
                end = _line_end(text, tokens, last)
                yield Statement(table, line, end, end, end, is_table=True)
            index = last
            continue
        while tokens[index].group() != "=":
            index += 1
        key = _path(text[tokens[first].start() : tokens[index].start()] + "= 0")
        index += 1
        while tokens[index].group().strip(" \t\r") == "":
            index += 1
        begin = tokens[index].start()
        last = _end_of_line(tokens, index)
        if table is not None:
            value_end = _value_end(tokens, index, last)
            end = _line_end(text, tokens, last)
            yield Statement((*table, *key), line, end, begin, value_end, is_table=False)
        index = last


def _end_of_line(tokens: list[re.Match[str]], index: int) -> int:
    """Return the index of the newline that ends the statement at *index*, or behind the last."""
    depth = 0
    while index < len(tokens):
        word = tokens[index].group()
        if word == "\n" and depth == 0:
            return index
        depth += (word in ("[", "{")) - (word in ("]", "}"))
        index += 1
    return index


def _line_end(text: str, tokens: list[re.Match[str]], newline: int) -> int:
    return tokens[newline].end() if newline < len(tokens) else len(text)


def _value_end(tokens: list[re.Match[str]], first: int, last: int) -> int:
    """Return the end of the value between the tokens, without blanks and a comment behind it."""
    while last - 1 > first:
        word = tokens[last - 1].group()
        if not (word.startswith("#") or word.isspace()):
            break
        last -= 1
    return tokens[last - 1].end()


def _path(statement: str) -> Path:
    """Return the path that a header or a key has."""
    document: Any = tomllib.loads(statement)
    path = []
    while isinstance(document, dict) and document:
        part, document = next(iter(document.items()))
        path.append(part)
    return tuple(path)
