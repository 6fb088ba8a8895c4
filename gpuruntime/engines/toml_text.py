# SPDX-License-Identifier: Apache-2.0
"""Change keys in the text of a TOML file; everything else keeps its bytes; pure."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.toml_render import key_text, literal, render_table
from gpuruntime.engines.toml_scan import TOKEN, Path, Statement, scan

# tomllib's memory grows with the square of the parts of a key.
_LONG_KEY = re.compile(
    r"""(?:^|[\[{,])[ \t]*(?:(?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""", re.MULTILINE
)


def parse(text: str) -> dict[str, Any]:
    """Return the document that *text* is; raise BadFileError, with line and column, if none."""
    if text.startswith("\ufeff"):
        raise BadFileError("begins with a byte order mark", "save it as UTF-8 without one")
    if _LONG_KEY.search(text):
        raise BadFileError("has a key of too many parts", "put an engine's config there")
    try:
        return tomllib.loads(text)
    # ValueError: more than TOMLDecodeError comes out, as for a number of 5000 digits.
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadFileError(f"is no TOML: {error}", "correct the file") from error


def assign(text: str, path: Path, value: Any) -> str:  # noqa: ANN401 (any TOML value)
    """Return *text* with *value* at *path*; a table that is missing on the way is made.

    A dict as value stands for a table that is not there yet. Raises BadFileError where the text
    cannot be added to, which only an unusual one is.
    """
    wanted = _load(text)
    table = wanted
    for part in path[:-1]:
        table = table.setdefault(part, {})
    table[path[-1]] = copy.deepcopy(value)
    if isinstance(value, dict):
        ways = [_append_tables, _in_inline_table, _by_tomlkit]
    else:
        ways = [_replace_value, _below_header, _append_header, _beside_dotted]
        ways += [_in_inline_table, _by_tomlkit]
    for way in ways:
        changed = way(text, path, value)
        if changed is not None:
            changed = _with_newlines_of(text, changed)
            if _means(changed, wanted):
                return changed
    raise BadFileError(
        f'is written so that "{".".join(path)}" cannot be set in it', "write its tables as [table]"
    )


def remove(text: str, path: Path) -> str:
    """Return *text* without what is at *path*, a key or a table; as it is if there is nothing."""
    wanted = _load(text)
    table: Any = wanted
    for part in path[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or path[-1] not in table:
        return text
    del table[path[-1]]
    for way in (_cut, _cut_by_tomlkit):
        changed = way(text, path)
        if changed is not None and _means(changed, wanted):
            return changed
    raise BadFileError(
        f'is written so that "{".".join(path)}" cannot be taken out', "take it out by hand"
    )


def append_item(text: str, path: Path, item: str) -> str:
    """Return *text* with *item* at the end of the list at *path*, whose lines stay as they are."""
    wanted = _load(text)
    table = wanted
    for part in path[:-1]:
        table = table[part]
    table[path[-1]] = [*table[path[-1]], item]
    for statement in scan(text):
        if not statement.is_table and statement.path == path:
            changed = _in_list(text, statement, item)
            if changed is not None and _means(changed, wanted):
                return changed
    return assign(text, path, table[path[-1]])


def _load(text: str) -> dict[str, Any]:
    # Floats as text: nan is not equal to itself.
    return tomllib.loads(text, parse_float=lambda number: f"float {number}")


def _means(text: str, wanted: Mapping[str, Any]) -> bool:
    """Return whether *text* means what is *wanted*, but for empty tables."""
    try:
        return without_empty(_load(text)) == without_empty(_floats_as_text(wanted))
    except (ValueError, RecursionError):
        return False


def _floats_as_text(value: Any) -> Any:  # noqa: ANN401 (any TOML value)
    if isinstance(value, float):
        return f"float {value!r}"
    if isinstance(value, dict):
        return {key: _floats_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats_as_text(item) for item in value]
    return value


def without_empty(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return *table* without tables that hold nothing."""
    kept = {}
    for key, value in table.items():
        inner = without_empty(value) if isinstance(value, dict) else value
        if inner != {}:
            kept[key] = inner
    return kept


def _with_newlines_of(text: str, changed: str) -> str:
    has_crlf = "\r\n" in text and re.search(r"(?<!\r)\n", text) is None
    return re.sub(r"\r?\n", "\r\n", changed) if has_crlf else changed


def _replace_value(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    for statement in scan(text):
        if not statement.is_table and statement.path == path:
            return text[: statement.value] + literal(value) + text[statement.value_end :]
    return None


def _below_header(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    """Add the key to its table, behind the last key that the table's header has below it."""
    last = None
    is_inside = len(path) == 1
    before = None
    for statement in scan(text):
        if statement.is_table:
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
    """Return where the block of comments right above the line at *at* begins."""
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
    """Add the table to the end of *text*, indented as the others of the same depth are."""
    depths = {
        len(found.path): _indent(text, found.start) for found in scan(text) if found.is_table
    }
    unit = 2 if any(depths.values()) else 0
    lines = "".join(render_table(path, value, len(path), unit))
    end = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{end}{lines if text else lines.lstrip()}"


def _beside_dotted(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    """Add the key behind one that a dotted key puts into the same table."""
    table: Path = ()
    found = None
    for statement in scan(text):
        if statement.is_table:
            table = statement.path
        elif statement.path[: len(path) - 1] == path[:-1] and path[: len(table)] == table:
            found = statement, len(table)
    if found is None:
        return None
    statement, length = found
    indent = _indent(text, statement.start)
    line = f"{indent}{key_text(path[length:])} = {literal(value)}"
    return _insert_line(text, statement.end, line)


def _in_inline_table(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    """Add the key to the end of the inline table that is its table."""
    for statement in scan(text):
        inner = text[statement.value : statement.value_end]
        if statement.path == path[:-1] and inner.startswith("{") and inner.endswith("}"):
            body = inner[1:-1].rstrip()
            blank = inner[1 + len(body) : -1]
            pair = f"{key_text(path[-1:])} = {literal(value)}"
            new = f"{{{body}{', ' if body.strip() else ''}{pair}{blank}}}"
            return text[: statement.value] + new + text[statement.value_end :]
    return None


def _by_tomlkit(text: str, path: Path, value: Any) -> str | None:  # noqa: ANN401
    """Change what is in inline tables in others."""
    try:
        document = tomlkit.parse(text)
        table: Any = document
        for part in path[:-1]:
            if part not in table:
                table[part] = tomlkit.inline_table()
            table = table[part]
        table[path[-1]] = value
        return tomlkit.dumps(document)
    # It has more of its own than its exceptions for what it does not expect.
    except (TOMLKitError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _cut(text: str, path: Path) -> str:
    """Take out the lines of *path*, and the empty line above a table of it."""
    spans = [
        (statement.start, statement.end)
        for statement in scan(text)
        if statement.path[: len(path)] == path
    ]
    for start, end in reversed(spans):
        is_header = text[start:end].lstrip().startswith("[")
        has_blank = is_header and text[:start].endswith("\n\n")
        text = text[: start - has_blank] + text[end:]
    return text.lstrip("\n") if spans and spans[0][0] == 0 else text


def _cut_by_tomlkit(text: str, path: Path) -> str | None:
    try:
        document = tomlkit.parse(text)
        table: Any = document
        for part in path[:-1]:
            table = table[part]
        del table[path[-1]]
        return tomlkit.dumps(document)
    except (TOMLKitError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _in_list(text: str, statement: Statement, item: str) -> str | None:
    """Put *item* before the bracket that closes the list, with the comma and the line it needs."""
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
    # The comment behind the last item stays behind it.
    new = f"\n{_indent(inner, line + 1)}{literal(item)}" + ("," if not comma else "")
    new = new if inner[newline - 1] != "\r" else new.replace("\n", "\r\n")
    cut = newline - (inner[newline - 1] == "\r")
    changed = inner[:at] + comma + inner[at:cut] + new + inner[cut:]
    return text[: statement.value] + changed + text[statement.value_end :]


def _spliced(text: str, at: int, new: str) -> str:
    return text[:at] + new + text[at:]
