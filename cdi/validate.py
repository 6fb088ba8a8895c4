# SPDX-License-Identifier: Apache-2.0
"""Report every problem of a CDI spec, with its line; the only module that imports jsonschema.

An error keeps the file from loading: the loader's own checks find it, and `schema/strict.json` is
tested against them. A warning does not; `advice` finds those. `schema/reference.json` gives the
verdict of the reference's separate schema tool.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass

import jsonschema

from cdi import advice, document, yamlio
from cdi.annotations import annotation_problems
from cdi.document import Problem
from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from cdi.document import Path

# More says nothing new; the rest is counted.
MAX_FINDINGS = 1000
# The schema takes a second for twice as much, and agrees with the loader anyway.
MAX_SCHEMA_CHARS = 128 << 10

_SCHEMAS = os.path.join(os.path.dirname(__file__), "schema")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LINE = re.compile(r"line (\d+): ")


@dataclass(frozen=True, slots=True)
class SpecFinding:
    """Something about a spec: *line* counts from 1, *severity* is "error" or "warning".

    *category* is a stable word, and *where* the member, as `devices[0].name`; "" is the file.
    """

    line: int | None
    severity: str
    category: str
    where: str
    message: str


def validate(
    text: str, stat_host: Callable[[str], os.stat_result] | None = None
) -> list[SpecFinding]:
    """Return everything to say about the spec *text*, by line; no error means that it loads.

    *stat_host* asks the host for files that the spec names; None leaves the host out.
    """
    lines: dict[Path, int] = {}
    try:
        written = yamlio.decode(text, lines)
    except CdiError as error:
        return [_undecoded(error, text)]
    spec = document.normalise(written)
    problems = list(document.problems(spec))
    warnings = [*advice.check(spec, stat_host), *_conversions(written, spec)]
    if not problems:
        warnings += advice.check_version(spec)
        problems += _disagreement(spec) if len(text) <= MAX_SCHEMA_CHARS else ()
    places = _Places(written, lines)
    found = [
        SpecFinding(places.line(problem.path), severity, *_told(problem))
        for severity, those in (("error", problems), ("warning", warnings))
        for problem in those[:MAX_FINDINGS]
    ]
    found.sort(key=lambda finding: finding.line or 0)
    for severity, count in (("error", len(problems)), ("warning", len(warnings))):
        if count > MAX_FINDINGS:
            message = f"{count - MAX_FINDINGS} more are not shown"
            found.append(SpecFinding(None, severity, "more", "", message))
    return found


def reference_verdict(text: str, filename: str) -> bool:
    """Return whether the reference's schema tool would call the spec *text* valid.

    It judges what is written, where the loader converts: `name: 7` loads, and is not valid.
    """
    try:
        written: Any = yamlio.decode(text)
    except CdiError:
        return False
    if not schema("reference").is_valid(written):
        return False
    if filename.endswith(".json"):
        return True
    owners = [written, *written["devices"]]
    return not any(
        problem for owner in owners for problem in annotation_problems(owner.get("annotations"))
    )


@functools.cache
def schema(name: str) -> jsonschema.Draft7Validator:
    """Return the validator of `schema/NAME.json`."""
    with open(os.path.join(_SCHEMAS, f"{name}.json"), encoding="utf-8") as stream:
        return jsonschema.Draft7Validator(json.load(stream))


def _undecoded(error: CdiError, text: str) -> SpecFinding:
    """Return *error* with its line."""
    found = _LINE.match(error.message)
    line, message = None, error.message
    if found:
        line, message = int(found[1]), message[found.end() :]
    elif control := _CONTROL.search(text):
        # The one thing of which the YAML decoder does not tell the line.
        line = text.count("\n", 0, control.start()) + 1
    return SpecFinding(line, "error", error.category, "", message)


def _told(problem: Problem) -> tuple[str, str, str]:
    return problem.category, document.place(problem.path), problem.message


class _Places:
    """Finds the lines of normalised paths in the document as it is *written*."""

    def __init__(self, written: object, lines: dict[Path, int]) -> None:
        self.written = written
        self.lines = lines
        # Of maps with very many members and very many problems, by identity.
        self.winners: dict[int, dict[str, str]] = {}

    def line(self, path: Path) -> int | None:
        """Return the line of *path* or, if it is not there, of what it would be in."""
        spelled = self._spelled(path)
        while spelled and spelled not in self.lines:
            spelled = spelled[:-1]
        return self.lines.get(spelled)

    def _spelled(self, path: Path) -> Path:
        """Return the normalised *path* with the member names as they are written."""
        spelled: Path = ()
        value: Any = self.written
        for step in path:
            here = step
            if isinstance(value, dict):
                if spelled[-1:] != ("annotations",):
                    if id(value) not in self.winners:
                        self.winners[id(value)] = _winners(value)
                    here = self.winners[id(value)].get(document.fold(str(step)), step)
                value = value.get(here)
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
            else:
                break
            spelled = (*spelled, here)
        return spelled


def _winners(members: dict[str, Any]) -> dict[str, str]:
    """Return folded name → name as written of *members*; of two, the one that counts."""
    by_bytes = sorted(members, key=lambda name: name.encode("utf-8", "surrogatepass"))
    return {document.fold(name): name for name in by_bytes if members[name] is not None}


def _conversions(written: object, spec: object) -> Iterator[Problem]:
    """Yield what the author of *written* may not have meant: scalars and members that turned."""
    # Most specs need no walk: they are read as they are written.
    if written != spec:
        yield from _turned(written, spec, ())


def _turned(written: Any, read: Any, path: Path) -> Iterator[Problem]:  # noqa: ANN401 (JSON)
    if written is read:
        # As all that the format does not know, however deep it is.
        return
    if isinstance(read, dict) and isinstance(written, dict):
        in_map = path[-1:] == ("annotations",)
        winners = _winners(written)
        for name in written:
            winner = winners.get(document.fold(name), name)
            if winner != name and not in_map:
                text = f'"{name}" does not count: "{winner}" is there too'
                yield Problem("shadowed-member", (*path, name), text)
        for name, value in read.items():
            spelled = name if in_map else winners.get(document.fold(name), name)
            yield from _turned(written.get(spelled), value, (*path, name))
    elif isinstance(read, list) and isinstance(written, list):
        for i, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from _turned(one, other, (*path, i))
    elif isinstance(read, str) and isinstance(written, (bool, int, float)):
        text = f'without quotes it is no string, and is read as "{read}"'
        yield Problem("converted-scalar", path, text)


def _disagreement(spec: object) -> list[Problem]:
    """Return what the schema finds in a *spec* that the loader accepts: nothing, or our bug."""
    error = next(schema("strict").iter_errors(spec), None)
    if error is None:
        return []
    text = f"the schema refuses what the loader accepts, which is a bug of ours: {error.message}"
    return [Problem("bug", tuple(error.absolute_path), text)]
