# SPDX-License-Identifier: Apache-2.0
"""Change options in the text of a config.toml; comments, order and unknown keys are kept; pure."""

from __future__ import annotations

import re
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import InlineTable

from gpuruntime.configfile import option_table
from gpuruntime.configfile.option_table import Option, Value
from gpuruntime.errors import ArgumentError, ConfigError
from gpuruntime.formats import toml_source

# The words for a boolean on the incumbent's command line.
_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))


def parse(argument: str, separator: str = ":") -> tuple[Option, Value]:
    """Return the option and value of `KEY[=VALUE]`; raise ArgumentError.

    The value None means: remove the option. The rules are the incumbent's: a list is split at
    *separator*, or at commas if the value has no separator; a boolean without a value is true;
    `nil` removes a feature.
    """
    key, equals, text = argument.partition("=")
    option = option_table.BY_KEY.get(key)
    if option is None:
        near = option_table.nearest(key)
        what = "is a table" if key in option_table.TABLES else "does not exist"
        raise ArgumentError(
            f'invalid config option "{key}": it {what}',
            f'use "{near}"' if near else 'see "gpuruntime config default" for every key',
        )
    if option.kind in ("bool", "optional"):
        if not equals or text in _TRUE:
            return option, True
        if text in _FALSE:
            return option, False
        if option.kind == "optional" and text == "nil":
            return option, None
        raise ArgumentError(f'invalid value "{text}" for "{key}"', "give true or false")
    if not equals:
        raise ArgumentError(f'"{key}" has no value', f'write "{key}=VALUE"')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f'the value of "{key}" is not valid UTF-8', "give it as UTF-8"
        ) from error
    if option.kind == "integer":
        # int() takes blanks, signs, underscores and other scripts' digits as well.
        if re.fullmatch("[0-9]{1,9}", text) is None:
            kind = option_table.KINDS[option.kind]
            if option.maximum:
                kind = f"a whole number from 1 to {option.maximum}"
            raise ArgumentError(f'invalid value "{text}" for "{key}"', f"give {kind}")
        return option, int(text)
    if option.kind == "list":
        return option, text.split(separator if separator and separator in text else ",")
    return option, text


def apply(text: str, option: Option, value: Value) -> str:
    """Return *text*, which must be TOML, with *option* set to *value*; None removes the option.

    Raises ConfigError if the table of the option is not a table, or cannot be added to.
    """
    path = tuple(option.key.split("."))
    edited = toml_source.load(text)
    table = edited
    for length, part in enumerate(path[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f'"{".".join(path[:length])}" is not a table', f'write "[{option.table}]"'
            )
    present = path[-1] in table
    if not present and value is None:
        return text
    if value is None:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    ways = [_with_tomlkit] if present else [_at_sample, _with_tomlkit, _at_end, _below_header]
    for change in ways:
        changed = change(text, path, value)
        if changed is not None and toml_source.has_meaning(changed, edited):
            return toml_source.with_newlines_of(text, changed)
    raise ConfigError(
        f'cannot set "{option.key}" in this file', "move its table to the end of the file"
    )


def _at_sample(text: str, path: tuple[str, ...], value: Value) -> str | None:
    """Put the option in place of the comment that shows how to set it; None without a comment."""
    for statement in toml_source.scan(text):
        if statement.kind == "sample" and statement.path == path:
            line = f"{path[-1]} = {option_table.literal(value)}"
            return text[: statement.value] + line + text[statement.value_end :]
    return None


def _with_tomlkit(text: str, path: tuple[str, ...], value: Value) -> str | None:
    try:
        document = tomlkit.parse(text)
        table: Any = document
        for position, part in enumerate(path[:-1], 1):
            if part not in table:
                is_super = position < len(path) - 1
                is_inline = isinstance(table, InlineTable)
                new = tomlkit.inline_table() if is_inline else tomlkit.table(is_super)
                table.append(part, new)
            table = table[part]
        if value is None:
            table.remove(path[-1])
        else:
            table[path[-1]] = value
        return tomlkit.dumps(document)
    # tomlkit raises more than its own exceptions for documents that it does not expect.
    except (TOMLKitError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None


# tomlkit cannot add to a table whose parts are in several places, or that only dotted keys make.
def _at_end(text: str, path: tuple[str, ...], value: Value) -> str:
    """Add the table and the option to the end of *text*."""
    end = "" if text.endswith("\n") else "\n"
    return f"{text}{end}\n[{'.'.join(path[:-1])}]\n{path[-1]} = {option_table.literal(value)}\n"


def _below_header(text: str, path: tuple[str, ...], value: Value) -> str:
    """Add the option, as a dotted key, below the header of the nearest table around it."""
    headers = {
        statement.path: statement
        for statement in toml_source.scan(text)
        if statement.kind == "table"
    }
    length = next((n for n in range(len(path) - 1, 0, -1) if path[:n] in headers), 0)
    start = text.find("\n", headers[path[:length]].start) + 1 if length else 0
    line = f"{'.'.join(path[length:])} = {option_table.literal(value)}\n"
    if length and not start:
        return f"{text}\n{line}"
    return text[:start] + line + text[start:]
