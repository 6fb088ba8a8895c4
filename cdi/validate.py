# SPDX-License-Identifier: Apache-2.0
"""Report every problem of a CDI spec, with its line; the only module that imports jsonschema.

A file with an error does not load: the loader's own checks report it, and `schema/strict.json` is
tested against them. A file with warnings loads; `advice` reports those. `schema/reference.json`
gives the verdict of the reference's separate schema tool.
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

# Further findings are only counted.
MAX_FINDINGS = 1000
# The schema check takes a second for twice as much; it only confirms the loader's checks.
MAX_SCHEMA_CHARS = 128 << 10

_SCHEMAS = os.path.join(os.path.dirname(__file__), "schema")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LINE = re.compile(r"line (\d+): ")


@dataclass(frozen=True, slots=True)
class SpecFinding:
    """A problem of a spec: *line* counts from 1, *severity* is "error" or "warning".

    *category* is a stable word, and *where* the member, such as `devices[0].name`; "" is the file.
    """

    line: int | None
    severity: str
    category: str
    where: str
    message: str


def validate(
    text: str, stat_host: Callable[[str], os.stat_result] | None = None
) -> list[SpecFinding]:
    """Return all findings about the spec *text*, by line; without an error, it loads.

    *stat_host* returns the status of a file that the spec names; None skips these checks.
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
    findings = [
        SpecFinding(places.line(problem.path), severity, *_parts(problem))
        for severity, those in (("error", problems), ("warning", warnings))
        for problem in those[:MAX_FINDINGS]
    ]
    findings.sort(key=lambda finding: finding.line or 0)
    for severity, count in (("error", len(problems)), ("warning", len(warnings))):
        if count > MAX_FINDINGS:
            message = f"{count - MAX_FINDINGS} more are not shown"
            findings.append(SpecFinding(None, severity, "more", "", message))
    return findings


def reference_verdict(text: str, filename: str) -> bool:
    """Return whether the reference's schema tool would call the spec *text* valid.

    It checks the document as written, without the loader's conversions: `name: 7` is not valid.
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
    match = _LINE.match(error.message)
    line, message = None, error.message
    if match:
        line, message = int(match[1]), message[match.end() :]
    elif control := _CONTROL.search(text):
        # The only problem that the YAML decoder reports without a line.
        line = text.count("\n", 0, control.start()) + 1
    return SpecFinding(line, "error", error.category, "", message)


def _parts(problem: Problem) -> tuple[str, str, str]:
    return problem.category, document.place(problem.path), problem.message


class _Places:
    """The lines of normalised paths in the document as *written*."""

    def __init__(self, written: object, lines: dict[Path, int]) -> None:
        self.written = written
        self.lines = lines
        # A cache by the id of a map, for maps with many members and problems.
        self.winners: dict[int, dict[str, str]] = {}

    def line(self, path: Path) -> int | None:
        """Return the line of *path* or, if it is missing, of the value that would contain it."""
        spelled = self._spelled(path)
        while spelled and spelled not in self.lines:
            spelled = spelled[:-1]
        return self.lines.get(spelled)

    def _spelled(self, path: Path) -> Path:
        """Return the normalised *path* with the member names as written."""
        spelled: Path = ()
        value: Any = self.written
        for step in path:
            spelled_step = step
            if isinstance(value, dict):
                if spelled[-1:] != ("annotations",):
                    if id(value) not in self.winners:
                        self.winners[id(value)] = _winners(value)
                    spelled_step = self.winners[id(value)].get(document.fold(str(step)), step)
                value = value.get(spelled_step)
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
            else:
                break
            spelled = (*spelled, spelled_step)
        return spelled


def _winners(members: dict[str, Any]) -> dict[str, str]:
    """Return folded name → name as written of *members*; of several, the one that counts."""
    by_bytes = sorted(members, key=lambda name: name.encode("utf-8", "surrogatepass"))
    return {document.fold(name): name for name in by_bytes if members[name] is not None}


def _conversions(written: object, spec: object) -> Iterator[Problem]:
    """Yield conversions that the author of *written* may not expect, of scalars and members."""
    # Most specs are read as they are written.
    if written != spec:
        yield from _conversions_in(written, spec, ())


def _conversions_in(written: Any, read: Any, path: Path) -> Iterator[Problem]:  # noqa: ANN401 (JSON)
    if written is read:
        # Values that the format does not define are not converted, at any depth.
        return
    if isinstance(read, dict) and isinstance(written, dict):
        in_map = path[-1:] == ("annotations",)
        winners = _winners(written)
        for name in written:
            winner = winners.get(document.fold(name), name)
            if winner != name and not in_map:
                text = f'"{name}" does not count, because "{winner}" exists too'
                yield Problem("shadowed-member", (*path, name), text)
        for name, value in read.items():
            spelled = name if in_map else winners.get(document.fold(name), name)
            yield from _conversions_in(written.get(spelled), value, (*path, name))
    elif isinstance(read, list) and isinstance(written, list):
        for i, (written_item, read_item) in enumerate(zip(written, read, strict=True)):
            yield from _conversions_in(written_item, read_item, (*path, i))
    elif isinstance(read, str) and isinstance(written, (bool, int, float)):
        text = f'without quotes it is no string, and is read as "{read}"'
        yield Problem("converted-scalar", path, text)


def _disagreement(spec: object) -> list[Problem]:
    """Return a problem if the schema refuses the *spec*, which the loader accepts: our bug."""
    error = next(schema("strict").iter_errors(spec), None)
    if error is None:
        return []
    text = f"the schema refuses what the loader accepts, which is a bug of ours: {error.message}"
    return [Problem("bug", tuple(error.absolute_path), text)]
