# SPDX-License-Identifier: Apache-2.0
"""The source of a TOML file: the positions of its statements, and the check of an edit.

A TOML parser returns values without their positions. Pure; not on the start path.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Literal

Path = tuple[str, ...]

# tomllib's memory grows with the square of the parts of a key.
LONG_KEY = re.compile(
    r"""(?:^|[\[{,])[ \t]*(?:(?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""", re.MULTILINE
)
# The tokens of a value or a header that are needed to find its end.
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
_SAMPLE = re.compile(r"#[ \t]*([A-Za-z0-9_-]+)[ \t]*=")


class Statement(Record):
    """A header ("table"), a key with its value ("key"), or a comment that shows one ("sample").

    The span of its lines is *start* to *end*, that of its value *value* to *value_end*; the value
    of a sample is the whole comment, a header has none. *in_array*: a [[header]], or a key below
    one, whose path alone does not say which item it is in.
    """

    __slots__ = ("end", "in_array", "kind", "path", "start", "value", "value_end")

    def __init__(
        self,
        kind: Literal["table", "key", "sample"],
        path: Path,
        start: int,
        end: int,
        value: int,
        value_end: int,
        in_array: bool,  # noqa: FBT001 (the fields, in order)
    ) -> None:
        self.kind = kind
        self.path = path
        self.start = start
        self.end = end
        self.value = value
        self.value_end = value_end
        self.in_array = in_array


def scan(text: str) -> Iterator[Statement]:
    """Return the statements of *text*, valid TOML, without members of inline tables."""
    table: Path = ()
    in_array = False
    tokens = list(TOKEN.finditer(text))
    index = 0
    while index < len(tokens):
        word = tokens[index].group()
        if word.isspace():
            index += 1
            continue
        first = index
        start = text.rfind("\n", 0, tokens[first].start()) + 1
        if word.startswith("#"):
            sample = _SAMPLE.match(word)
            if sample and not text[start : tokens[first].start()].strip(" \t"):
                at = tokens[first].start()
                comment_end = at + len(word.removesuffix("\r"))
                end = _line_end(text, tokens, first + 1)
                path = (*table, sample.group(1))
                yield Statement("sample", path, start, end, at, comment_end, in_array)
            index += 1
            continue
        if word == "[":
            last = _end_of_line(tokens, index)
            header = text[tokens[first].start() : _value_end(tokens, first, last)]
            in_array = header.startswith("[[")
            table = _path(header)
            end = _line_end(text, tokens, last)
            yield Statement("table", table, start, end, end, end, in_array)
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
        value_end = _value_end(tokens, index, last)
        end = _line_end(text, tokens, last)
        yield Statement("key", (*table, *key), start, end, begin, value_end, in_array)
        index = last


def _end_of_line(tokens: list[re.Match[str]], index: int) -> int:
    """Return the index of the newline that ends the statement at *index*, or the end."""
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
    """Return the end of the value between the tokens, without trailing blanks and comments."""
    while last - 1 > first:
        word = tokens[last - 1].group()
        if not (word.startswith("#") or word.isspace()):
            break
        last -= 1
    return tokens[last - 1].end()


def _path(statement: str) -> Path:
    """Return the path that a header or a key has."""
    value: Any = tomllib.loads(statement)
    path = []
    while value and isinstance(value, (dict, list)):
        if isinstance(value, list):
            (value,) = value
            continue
        part, value = next(iter(value.items()))
        path.append(part)
    return tuple(path)


def load(text: str) -> dict[str, Any]:
    """Return the document *text*, with floats as text, because nan is not equal to itself.

    Raises ValueError if *text* is not TOML.
    """
    return tomllib.loads(text, parse_float=lambda number: f"float {number}")


def has_meaning(text: str, document: Mapping[str, Any]) -> bool:
    """Return whether *text* decodes to *document*, apart from empty tables."""
    try:
        return without_empty(load(text)) == without_empty(_floats_as_text(document))
    except (ValueError, RecursionError):
        return False


def without_empty(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return *table* without empty tables."""
    result = {}
    for key, value in table.items():
        inner = without_empty(value) if isinstance(value, dict) else value
        if inner != {}:
            result[key] = inner
    return result


def _floats_as_text(value: Any) -> Any:  # noqa: ANN401 (any TOML value)
    if isinstance(value, float):
        return f"float {value!r}"
    if isinstance(value, dict):
        return {key: _floats_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats_as_text(item) for item in value]
    return value


def with_newlines_of(text: str, changed: str) -> str:
    r"""Return *changed* with "\r\n" at its line ends if those of *text* all have it."""
    has_crlf = "\r\n" in text and re.search(r"(?<!\r)\n", text) is None
    return re.sub(r"\r?\n", "\r\n", changed) if has_crlf else changed
