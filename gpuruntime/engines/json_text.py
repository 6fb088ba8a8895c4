# SPDX-License-Identifier: Apache-2.0
"""Change members of a JSON object in its text; everything else keeps its bytes; pure."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from gpuruntime.engines.errors import BadFileError

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
NEW_INDENT = "    "


class Member(NamedTuple):
    """Where in the text a member of an object is: its key, and its value until *end*."""

    key: str
    start: int
    value: int
    end: int


def parse(text: str) -> dict[str, Any]:
    """Return the object that *text* is; raise BadFileError, with line and column, if it is none.

    A key that is twice in one object is an error: which of the two counts is a matter of taste.
    """
    if not text.strip():
        raise BadFileError("is empty, which is no JSON", 'write "{}" into it, or remove it')
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise BadFileError(f"is no JSON: {error.msg}: {where}", "correct the file") from error
    # ValueError: a number of more digits than an int may have.
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"is no JSON: {error}", "correct the file") from error
    if not isinstance(document, dict):
        raise BadFileError("is JSON, but no object", "put the object of an engine's config there")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadFileError(f'has the key "{twice}" twice', "remove one of the two")
    return found


def _no_constant(word: str) -> Any:  # noqa: ANN401 (json's)
    raise BadFileError(f"is no JSON: {word} is no number of it", "correct the file")


def assign(text: str, path: tuple[str, ...], value: Any) -> str:  # noqa: ANN401 (any JSON value)
    """Return *text* with *value* at *path*; objects on the way are made where there are none."""
    brace = _begin(text)
    for depth, part in enumerate(path):
        members = _members(text, brace)
        found = next((member for member in members if member.key == part), None)
        if found is None:
            for missing in reversed(path[depth + 1 :]):
                value = {missing: value}
            return _insert(text, brace, members, (part, value), depth)
        if depth == len(path) - 1 or text[found.value] != "{":
            # null is as good as nothing there.
            for missing in reversed(path[depth + 1 :]):
                value = {missing: value}
            unit = _unit(text)
            new = _render(value, unit, _line_indent(text, found.start), _newline(text))
            return text[: found.value] + new + text[found.end :]
        brace = found.value
    return text


def remove(text: str, path: tuple[str, ...]) -> str:
    """Return *text* without the member at *path*; as it is if there is none."""
    brace = _begin(text)
    for depth, part in enumerate(path):
        members = _members(text, brace)
        index = next((i for i, member in enumerate(members) if member.key == part), None)
        if index is None:
            return text
        if depth == len(path) - 1:
            return _cut(text, brace, members, index)
        brace = members[index].value
        if text[brace] != "{":
            return text
    return text


def _cut(text: str, brace: int, members: list[Member], index: int) -> str:
    if len(members) == 1:
        return text[: brace + 1] + text[text.index("}", members[0].end) :]
    if index == len(members) - 1:
        return text[: members[index - 1].end] + text[members[index].end :]
    return text[: members[index].start] + text[members[index + 1].start :]


def _begin(text: str) -> int:
    return _skip(text, 0)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _members(text: str, brace: int) -> list[Member]:
    """Return the members of the object that begins at *brace*."""
    members = []
    at = _skip(text, brace + 1)
    while text[at] != "}":
        start = at
        key, at = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, at) + 1)
        end = _DECODER.raw_decode(text, value)[1]
        members.append(Member(key, start, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members


def _insert(
    text: str, brace: int, members: list[Member], pair: tuple[str, Any], depth: int
) -> str:
    """Put the member *pair* at the end of the object, in the manner of those that are there."""
    key, value = pair
    unit = _unit(text)
    newline = _newline(text)
    if members:
        last = members[-1]
        gap = text[members[-2].end : last.start].partition(",")[2] if len(members) > 1 else " "
        before = text[brace + 1 : last.start] if len(members) == 1 else gap
        if "\n" not in before:
            # All on one line, as it is.
            new = f",{gap}{json.dumps(key)}: {_compact(value)}"
        else:
            indent = _line_indent(text, last.start)
            new = f",{newline}{indent}{json.dumps(key)}: {_render(value, unit, indent, newline)}"
        return text[: last.end] + new + text[last.end :]
    close = text.index("}", brace)
    outer = _line_indent(text, brace) if depth else ""
    indent = outer + unit
    new = f"{newline}{indent}{json.dumps(key)}: {_render(value, unit, indent, newline)}"
    return f"{text[: brace + 1]}{new}{newline}{outer}{text[close:]}"


def _render(value: Any, unit: str, indent: str, newline: str) -> str:  # noqa: ANN401
    """Return *value* as JSON whose lines but the first are indented by *indent*."""
    dumped = json.dumps(value, indent=unit, ensure_ascii=False)
    return dumped.replace("\n", newline + indent)


def _compact(value: Any) -> str:  # noqa: ANN401
    return json.dumps(value, ensure_ascii=False)


def _line_indent(text: str, at: int) -> str:
    """Return the blanks at the beginning of the line in which *at* is."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """Return what the members of the outermost object are indented by."""
    match = re.match(r"[ \t\r\n]*\{[ \t]*\r?\n([ \t]+)", text)
    return match.group(1) if match else NEW_INDENT


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text and re.search(r"(?<!\r)\n", text) is None else "\n"
