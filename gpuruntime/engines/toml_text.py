# SPDX-License-Identifier: Apache-2.0
"""Change keys in the text of a TOML file; everything else keeps its bytes; pure.

tomlkit changes existing values; our own edits of the text do so only where tomlkit fails or
changes something else. New keys and tables are added by our own edits first, because tomlkit puts
them below the comment of the next table. A result is used only if it parses to the expected
document.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.toml_render import key_text, literal, render_table
from gpuruntime.formats import toml_source
from gpuruntime.formats.toml_source import (
    LONG_KEY,
    TOKEN,
    Path,
    Statement,
    has_meaning,
    with_newlines_of,
)

# tomlkit's time grows faster than the text: half a minute for 800 KB.
MAX_TOMLKIT_CHARS = 64 << 10


def parse(text: str) -> dict[str, Any]:
    """Return the document in *text*; raise BadFileError, with line and column, if not valid."""
    if text.startswith("\ufeff"):
        raise BadFileError("begins with a byte order mark", "save it as UTF-8 without one")
    if LONG_KEY.search(text):
        raise BadFileError(
            "has a key of too many parts", "replace the content by a valid config of the engine"
        )
    try:
        return tomllib.loads(text)
    # Not only TOMLDecodeError: a number of 5000 digits raises another ValueError.
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadFileError(f"is not valid TOML: {error}", "correct the file") from error


def assign(text: str, path: Path, value: Any) -> str:  # noqa: ANN401 (any TOML value)
    """Return *text* with *value* at *path*; missing parent tables are added.

    If *value* is a dict, the table must not exist yet. Raises BadFileError if the text cannot be
    edited, which happens with an unusual text only.
    """
    expected = toml_source.load(text)
    table = expected
    for part in path[:-1]:
        table = table.setdefault(part, {})
    is_present = path[-1] in table
    table[path[-1]] = copy.deepcopy(value)
    edits: list[Callable[[str, Path, Any], str | None]]
    if isinstance(value, dict):
        edits = [_append_tables, _in_inline_table, _add_by_tomlkit]
    elif is_present:
        edits = [_set_by_tomlkit, _replace_value]
        if len(text) > MAX_TOMLKIT_CHARS:
            edits.reverse()
    else:
        edits = [_below_header, _append_header, _beside_dotted, _in_inline_table, _add_by_tomlkit]
    for edit in edits:
        changed = edit(text, path, value)
        if changed is not None:
            changed = with_newlines_of(text, changed)
            if has_meaning(changed, expected):
                return changed
    raise BadFileError(
        f'is written so that "{".".join(path)}" cannot be set in it', "write its tables as [table]"
    )


def remove(text: str, path: Path) -> str:
    """Return *text* without the key or table at *path*; unchanged if it does not exist.

    Raises BadFileError if the text cannot be edited.
    """
    expected = toml_source.load(text)
    table: Any = expected
    for part in path[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or path[-1] not in table:
        return text
    del table[path[-1]]
    # tomlkit also removes the comment above the next table, and leaves blank lines.
    for edit in (_cut, _cut_by_tomlkit):
        changed = edit(text, path)
        if changed is not None and has_meaning(changed, expected):
            return changed
    raise BadFileError(
        f'is written so that "{".".join(path)}" cannot be removed from it', "remove it by hand"
    )


def append_item(text: str, path: Path, item: str) -> str:
    """Return *text* with *item* appended to the list at *path*, whose lines are unchanged."""
    expected = toml_source.load(text)
    table = expected
    for part in path[:-1]:
        table = table[part]
    table[path[-1]] = [*table[path[-1]], item]
    # tomlkit indents a single item by four blanks, whatever the indentation of the file.
    changed = _in_list(text, path, item)
    if changed is not None and has_meaning(changed, expected):
        return changed
    return assign(text, path, table[path[-1]])


def _statements(text: str) -> Iterator[Statement]:
    """Return the headers and keys of *text*, not those in [[tables]]: their path is ambiguous."""
    for statement in toml_source.scan(text):
        if statement.kind != "sample" and not statement.in_array:
            yield statement


def _set_by_tomlkit(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    def change(document: Any) -> None:  # noqa: ANN401 (tomlkit's)
        _at(document, path[:-1])[path[-1]] = tomlkit.value(literal(value))

    return _only_value_of(path, text, _by_tomlkit(text, change))


def _only_value_of(path: Path, text: str, changed: str | None) -> str | None:
    """Return *changed* if only the value of *path* or of a parent key differs from *text*."""
    if changed is None:
        return None
    for statement in _statements(text):
        if statement.kind == "key" and statement.path == path[: len(statement.path)]:
            before, after = text[: statement.value], text[statement.value_end :]
            has_room = len(before) + len(after) < len(changed)
            if has_room and changed.startswith(before) and changed.endswith(after):
                return changed
    return None


def _replace_value(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    for statement in _statements(text):
        if statement.kind == "key" and statement.path == path:
            return text[: statement.value] + literal(value) + text[statement.value_end :]
    return None


def _below_header(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    """Add the key to its table, after the last key below the table's header."""
    last = None
    is_inside = len(path) == 1
    before = None
    for statement in _statements(text):
        if statement.kind == "table":
            before = before or statement
            is_inside = statement.path == path[:-1]
        if is_inside:
            last = statement
    if last is not None:
        indent = _indent(text, last.start)
        return _insert_line(text, last.end, f"{indent}{key_text(path[-1:])} = {literal(value)}")
    if len(path) > 1:
        return None
    at = _above_comments(text, before.start if before else len(text))
    blank = "\n" if before else ""
    return _insert_line(text, at, f"{key_text(path)} = {literal(value)}{blank}")


def _above_comments(text: str, at: int) -> int:
    """Return the start of the comment block directly above the line at *at*."""
    if at == len(text):
        return at
    while at:
        line = text.rfind("\n", 0, at - 1) + 1
        if not text[line:at].lstrip().startswith("#"):
            break
        at = line
    return at


def _insert_line(text: str, at: int, line: str) -> str:
    end = "" if at == 0 or text[at - 1] == "\n" else "\n"
    return f"{text[:at]}{end}{line}\n{text[at:]}"


def _indent(text: str, at: int) -> str:
    match = re.compile(r"[ \t]*").match(text, at)
    return match.group() if match else ""


def _append_header(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    return _append_tables(text, path[:-1], {path[-1]: value}) if len(path) > 1 else None


def _append_tables(text: str, path: Path, value: Mapping[str, Any]) -> str | None:
    """Add the table to the end of *text*, indented like the others of the same depth."""
    depths = {
        len(statement.path): _indent(text, statement.start)
        for statement in _statements(text)
        if statement.kind == "table"
    }
    unit = 2 if any(depths.values()) else 0
    lines = "".join(render_table(path, value, len(path), unit))
    end = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{end}{lines if text else lines.lstrip()}"


def _beside_dotted(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    """Add the key after a dotted key of the same table."""
    table: Path = ()
    sibling = None
    for statement in _statements(text):
        if statement.kind == "table":
            table = statement.path
        elif statement.path[: len(path) - 1] == path[:-1] and path[: len(table)] == table:
            sibling = statement, len(table)
    if sibling is None:
        return None
    statement, length = sibling
    indent = _indent(text, statement.start)
    line = f"{indent}{key_text(path[length:])} = {literal(value)}"
    return _insert_line(text, statement.end, line)


def _in_inline_table(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    """Add the key to the end of its inline table."""
    for statement in _statements(text):
        inner = text[statement.value : statement.value_end]
        if statement.path == path[:-1] and inner.startswith("{") and inner.endswith("}"):
            body = inner[1:-1].rstrip()
            blank = inner[1 + len(body) : -1]
            pair = f"{key_text(path[-1:])} = {literal(value)}"
            new = f"{{{body}{', ' if body.strip() else ''}{pair}{blank}}}"
            return text[: statement.value] + new + text[statement.value_end :]
    return None


def _add_by_tomlkit(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    """Set the key with tomlkit; missing tables become inline tables."""

    def change(document: Any) -> None:  # noqa: ANN401 (tomlkit's)
        table = document
        for part in path[:-1]:
            if part not in table:
                table[part] = tomlkit.inline_table()
            table = table[part]
        table[path[-1]] = value

    return _by_tomlkit(text, change)


def _by_tomlkit(text: str, change: Callable[[Any], None]) -> str | None:
    """Return *text* after *change* of its tomlkit document, None if tomlkit fails."""
    try:
        document = tomlkit.parse(text)
        change(document)
        return tomlkit.dumps(document)
    # On unexpected input tomlkit raises other exceptions than its own.
    except (TOMLKitError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None


def _at(document: Any, path: Path) -> Any:  # noqa: ANN401 (tomlkit's)
    """Return the item at *path* of the tomlkit *document*."""
    for part in path:
        document = document[part]
    return document


def _cut(text: str, path: Path) -> str:
    """Return *text* without the lines of *path*, and without the empty line above its tables."""
    spans = [
        (statement.start, statement.end)
        for statement in _statements(text)
        if statement.path[: len(path)] == path
    ]
    for start, end in reversed(spans):
        is_header = text[start:end].lstrip().startswith("[")
        has_blank = is_header and text[:start].endswith("\n\n")
        text = text[: start - has_blank] + text[end:]
    return text.lstrip("\n") if spans and spans[0][0] == 0 else text


def _cut_by_tomlkit(text: str, path: Path) -> str | None:
    def change(document: Any) -> None:  # noqa: ANN401 (tomlkit's)
        del _at(document, path[:-1])[path[-1]]

    return _by_tomlkit(text, change)


def _in_list(text: str, path: Path, item: str) -> str | None:
    """Add *item* before the closing bracket of the list, with a comma and a line if needed."""
    statement = next(
        (
            statement
            for statement in _statements(text)
            if statement.kind == "key" and statement.path == path
        ),
        None,
    )
    if statement is None:
        return None
    inner = text[statement.value : statement.value_end]
    tokens = [token for token in TOKEN.finditer(inner) if not token.group().isspace()]
    words = [token for token in tokens if not token.group().startswith("#")]
    if len(words) < 2 or words[0].group() != "[" or words[-1].group() != "]":
        return None
    last = words[-2]
    at = last.end()
    if last.group() == "[":
        return _spliced(text, statement.value + at, literal(item))
    comma = "" if last.group() == "," else ","
    line = inner.rfind("\n", 0, last.start())
    if line < 0:
        return _spliced(text, statement.value + at, f"{comma} {literal(item)}")
    newline = inner.find("\n", at)
    if newline < 0:
        return _spliced(text, statement.value + at, f"{comma} {literal(item)}")
    # A comment after the last item stays after that item.
    new = f"\n{_indent(inner, line + 1)}{literal(item)}" + ("," if not comma else "")
    new = new if inner[newline - 1] != "\r" else new.replace("\n", "\r\n")
    cut = newline - (inner[newline - 1] == "\r")
    changed = inner[:at] + comma + inner[at:cut] + new + inner[cut:]
    return text[: statement.value] + changed + text[statement.value_end :]


def _spliced(text: str, at: int, new: str) -> str:
    return text[:at] + new + text[at:]
