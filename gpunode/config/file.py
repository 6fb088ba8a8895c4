# SPDX-License-Identifier: Apache-2.0
"""Read a config file v1: YAML of bounded size, checked by the JSON schema beside this module."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from typing import Any

from cdi import yamlio
from cdi.errors import CdiError
from gpunode.config import schema_check
from gpunode.config.schema_check import CHECKER
from gpuruntime.errors import ConfigError

MAX_BYTES = 1 << 20
# More than any real file has; aliases count as what they stand for.
_NAME_A_FILE = "name a regular file that can be read"
_SCHEMA = os.path.join(os.path.dirname(__file__), "schema.json")
_MARKER = re.compile(r"---(?:\s|$)")
_HINT = "correct the file, or name another one"

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The checked content of a config file; *lines* has the line of each key by its path."""

    path: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)

    def get(self, path: Path) -> Any:  # noqa: ANN401 (JSON)
        """Return the value at *path*, None if the file does not set it."""
        value: Any = self.values
        for step in path:
            if isinstance(step, int):
                value = value[step]
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value

    def line(self, path: Path) -> int:
        """Return the line of the value at *path*, or of the nearest value around it."""
        return _line_of(path, self.lines)

    def error(self, path: Path, problem: str, hint: str) -> ConfigError:
        """Return the error for a *problem* of the value at *path*, with its line."""
        return _error(self.path, self.lines, path, problem, hint)


def read(path: str, schema: str = _SCHEMA) -> ConfigFile:
    """Return the content of the config file at *path*; *schema* is the path of its JSON schema.

    Raises ConfigError if it cannot be read, is not valid YAML, has another version, an unknown key
    or a value that the schema does not allow. The error names the file, the line and the key.
    """
    return parse(_text(path), path, schema)


def parse(text: str, path: str, schema: str = _SCHEMA) -> ConfigFile:
    """Return the content of *text*, which is that of the file *path*; raise ConfigError."""
    lines: dict[Path, int] = {}
    try:
        values = yamlio.decode(text, lines)
    except CdiError as error:
        raise _unusable(path, error.message) from error
    if _has_more_documents(text):
        raise _unusable(path, "it has more than one document")
    values = _without_null({} if values is None else values)
    if isinstance(values, dict):
        version = values.get("version", "v1")
        if version != "v1":
            problem = f"unknown version: {schema_check.shown(version)}"
            raise _error(path, lines, ("version",), problem, 'write "version: v1"')
    _check(values, lines, path, schema)
    assert isinstance(values, dict)
    return ConfigFile(path, values, lines)


def _text(path: str) -> str:
    """Return the text of the file *path*; raise ConfigError."""
    try:
        # O_NONBLOCK: a FIFO must not block us.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as stream:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _unusable(path, "not a regular file", _NAME_A_FILE)
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), _NAME_A_FILE) from error
    if len(data) > MAX_BYTES:
        raise _unusable(path, f"larger than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _unusable(path, f"not UTF-8 at byte {error.start}") from error


def _has_more_documents(text: str) -> bool:
    """Return whether anything but comments is in a second document of the YAML *text*."""
    document_count, has_content = 0, False
    for line in text.splitlines():
        if _MARKER.match(line):
            document_count, has_content = document_count + has_content, bool(line[3:].strip())
        elif line.strip() and not line.lstrip().startswith(("#", "%")):
            has_content = True
    return document_count + has_content > 1


def _without_null(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return *value* without the members that are null, which count as missing."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _check(values: object, lines: dict[Path, int], path: str, schema: str) -> None:
    """Raise ConfigError for the first line of *values* that the schema does not allow."""
    problems = CHECKER.problems(values, schema)
    if problems:
        raise _error(path, lines, *min(problems, key=lambda problem: _line_of(problem[0], lines)))


def _line_of(place: Path, lines: dict[Path, int]) -> int:
    """Return the line of *place*, or of the nearest value around it."""
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 1)


def _error(path: str, lines: dict[Path, int], place: Path, problem: str, hint: str) -> ConfigError:
    return ConfigError(f'"{path}", line {_line_of(place, lines)}: {problem}', hint)


def _unusable(path: str, problem: str, hint: str = _HINT) -> ConfigError:
    return ConfigError(f'cannot use the config file "{path}": {problem}', hint)
