# SPDX-License-Identifier: Apache-2.0
"""The result of a check: notes while it runs, one finding at the end; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from gpuruntime.errors import escape

Status = Literal["ok", "warn", "fail"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"
_RANK = {FAIL: 0, WARN: 1, OK: 2}
# A finding is a line; with every file of a broken directory in it, nobody reads it.
_MAX_NOTES = 3


@dataclass(frozen=True, slots=True)
class Note:
    """One thing that a check has seen. *action* is what to do about it, "" for nothing."""

    status: Status
    what: str
    action: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the check *check* says in the end."""

    check: str
    status: Status
    what: str
    action: str

    def without(self, root: str) -> Finding:
        """Return this with paths as the host has them whose tree is at *root*."""
        if root == "/":
            return self
        return replace(
            self, what=self.what.replace(root, ""), action=self.action.replace(root, "")
        )

    def line(self) -> str:
        """Return this as one line."""
        text = f"{self.status:<4}  {self.check:<14}  {escape(self.what)}"
        return f"{text}; {escape(self.action)}" if self.action else text


def ok(what: str) -> Note:
    """Return a note that something is as it should be."""
    return Note(OK, what)


def warn(what: str, action: str) -> Note:
    """Return a note about what may not be as it is meant."""
    return Note(WARN, what, action)


def fail(what: str, action: str) -> Note:
    """Return a note about what keeps containers from their GPUs."""
    return Note(FAIL, what, action)


def combine(check: str, notes: Iterable[Note]) -> Finding:
    """Return the finding of *notes*: the worst first, and what to do about the first of them."""
    ordered = sorted(notes, key=lambda note: _RANK[note.status])
    if not ordered:
        return Finding(check, OK, "nothing to say", "")
    worst = ordered[0]
    told = [note for note in ordered if note.status != OK] or ordered
    text = "; ".join(note.what for note in told[:_MAX_NOTES])
    if len(told) > _MAX_NOTES:
        text += f"; and {len(told) - _MAX_NOTES} more"
    return Finding(check, worst.status, text, worst.action)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0 if all is well, 1 if there are warnings at most, 2 if something fails."""
    return 2 - min((_RANK[finding.status] for finding in findings), default=2)
