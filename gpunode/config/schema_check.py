# SPDX-License-Identifier: Apache-2.0
"""Check the content of a config file by a JSON schema, here or in a child process.

jsonschema and what it imports take 5 MiB of memory for as long as a process lives: a service that
reads its config seldom leaves that to a child.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from cdi import document
from gpuruntime.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import jsonschema

Path = tuple[str | int, ...]
# Place, problem and hint.
Problem = tuple[Path, str, str]

_MAX_SHOWN = 60
_DEADLINE_S = 30.0
_KEPT = 8
_PROGRAM = (
    "import sys; from json import loads; sys.path = loads(sys.argv[1]); "
    "from gpunode.config.schema_check import main; main()"
)


class Checker:
    """Checks in this process, or in a child that imports modules from *import_path*.

    Several services read the same file, some again and again: a child is not started for values
    that were good before.
    """

    def __init__(self) -> None:
        self.import_path: Sequence[str] | None = None
        self._good: deque[str] = deque(maxlen=_KEPT)

    def problems(self, values: object, schema: str) -> list[Problem]:
        """Return what the schema in the file *schema* does not allow; raise ConfigError."""
        if self.import_path is None:
            return _problems(values, schema)
        question = json.dumps([values, schema])
        if question in self._good:
            return []
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(self.import_path)]
        try:
            done = subprocess.run(
                command,
                input=question,
                capture_output=True,
                text=True,
                check=True,
                timeout=_DEADLINE_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"the process that checks config files has failed: {error}", "try again"
            ) from error
        problems = json.loads(done.stdout)
        if not problems:
            self._good.append(question)
        return [(tuple(place), problem, hint) for place, problem, hint in problems]


CHECKER = Checker()


def main() -> None:
    """Check the values of standard input, and print the problems."""
    values, schema = json.load(sys.stdin)
    json.dump(_problems(values, schema), sys.stdout)


def shown(value: object) -> str:
    """Return *value* for a message."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _problems(values: object, schema: str) -> list[Problem]:
    import jsonschema  # noqa: PLC0415 (its memory)

    with open(schema, encoding="utf-8") as stream:
        validator = jsonschema.Draft7Validator(json.load(stream))
    return [problem for error in validator.iter_errors(values) for problem in _of_error(error)]


def _of_error(error: jsonschema.ValidationError) -> list[Problem]:
    """Return place, problem and hint for *error*; several for several unknown keys."""
    place: Path = tuple(error.absolute_path)
    schema: Any = error.schema
    value: Any = error.instance
    where = f'"{document.place(place)}"' if place else "the file"
    if error.validator == "additionalProperties":
        names = list(schema["properties"])
        return [
            ((*place, key), f'unknown key "{document.place((*place, key))}"', _nearest(key, names))
            for key in value
            if key not in names
        ]
    if error.validator == "required":
        missing = next(name for name in schema["required"] if name not in value)
        return [(place, f'{where} has no "{missing}"', f'add "{missing}"')]
    expected = schema.get("description", "")
    return [(place, f"{where} is {shown(value)}, not {expected}", f"write {expected}")]


def _nearest(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, 1)
    return f'did you mean "{near[0]}"?' if near else f"use one of {', '.join(names)}"
