# SPDX-License-Identifier: Apache-2.0
"""Change members of a JSON object in its text; everything else keeps its bytes; pure.

The text is read like dockerd does since 23.0: a byte order mark is skipped, and a blank text is an
empty object. Text that is not valid JSON is refused even where dockerd's decoder accepts it.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from gpuruntime.engines.errors import BadFileError

BYTE_ORDER_MARK = "\ufeff"
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
NEW_INDENT = "    "


class Member(NamedTuple):
    """A member of an object: its key, and the offsets of the key, of the value and of its end."""

    key: str
    start: int
    value: int
    end: int


def parse(text: str) -> dict[str, Any]:
    """Return the object in *text*; raise BadFileError, with line and column, if it is not one.

    A repeated key is an error: dockerd merges two objects and takes the last of other values.
    """
    text = text.removeprefix(BYTE_ORDER_MARK)
    if _is_blank(text):
        return {}
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise BadFileError(
            f"is not valid JSON: {error.msg}: {where}", "correct the file"
        ) from error
    # ValueError: a number has more digits than int() accepts.
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"is not valid JSON: {error}", "correct the file") from error
    if not isinstance(document, dict):
        raise BadFileError("is not a JSON object", "replace the content by a JSON object")
    return document


def _is_blank(text: str) -> bool:
    return _SPACE.fullmatch(text) is not None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BadFileError(f'has the key "{repeated}" twice', "remove one of the two")
    return members


def _refuse_constant(word: str) -> Any:  # noqa: ANN401 (json's)
    raise BadFileError(f"is not valid JSON: {word} is not a JSON number", "correct the file")


def assign(text: str, path: tuple[str, ...], value: Any) -> str:  # noqa: ANN401 (any JSON value)
    """Return *text* with *value* at *path*; missing parent objects are added."""
    if _is_blank(text.removeprefix(BYTE_ORDER_MARK)):
        text = text[: text.startswith(BYTE_ORDER_MARK)] + "{}"
    start = _begin(text)
    for depth, part in enumerate(path):
        members = _members(text, start)
        member = next((member for member in members if member.key == part), None)
        if member is None:
            for missing in reversed(path[depth + 1 :]):
                value = {missing: value}
            return _insert(text, start, members, (part, value), depth)
        if depth == len(path) - 1 or text[member.value] != "{":
            # A parent that is null counts as missing.
            for missing in reversed(path[depth + 1 :]):
                value = {missing: value}
            unit = _unit(text)
            new = _render(value, unit, _line_indent(text, member.start), _newline(text))
            return text[: member.value] + new + text[member.end :]
        start = member.value
    return text


def remove(text: str, path: tuple[str, ...]) -> str:
    """Return *text* without the member at *path*; unchanged if the member does not exist."""
    if _is_blank(text.removeprefix(BYTE_ORDER_MARK)):
        return text
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
    return _skip(text, int(text.startswith(BYTE_ORDER_MARK)))


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
    """Return *text* with *pair* as the last member of the object, formatted like its others."""
    key, value = pair
    unit = _unit(text)
    newline = _newline(text)
    if members:
        last = members[-1]
        gap = text[members[-2].end : last.start].partition(",")[2] if len(members) > 1 else " "
        before = text[brace + 1 : last.start] if len(members) == 1 else gap
        if "\n" not in before:
            # The members are on one line.
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
    """Return *value* as JSON; every line except the first is indented by *indent*."""
    dumped = json.dumps(value, indent=unit, ensure_ascii=False)
    return dumped.replace("\n", newline + indent)


def _compact(value: Any) -> str:  # noqa: ANN401
    return json.dumps(value, ensure_ascii=False)


def _line_indent(text: str, at: int) -> str:
    """Return the indentation of the line that contains *at*."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """Return the indentation of the members of the outermost object."""
    match = re.match(r"\ufeff?[ \t\r\n]*\{[ \t]*\r?\n([ \t]+)", text)
    return match.group(1) if match else NEW_INDENT


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text and re.search(r"(?<!\r)\n", text) is None else "\n"
