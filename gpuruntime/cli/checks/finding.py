# SPDX-License-Identifier: Apache-2.0
"""The result of a check: notes, combined into one finding; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpuruntime.errors import escape

Status = Literal["ok", "warn", "fail"]
OK: Status = "ok"
WARN: Status = "warn"
FAIL: Status = "fail"
_RANK = {FAIL: 0, WARN: 1, OK: 2}
# SGR: red, yellow, green.
_COLORS = {FAIL: "31", WARN: "33", OK: "32"}
# A finding is one line, which must stay readable if every file of a directory has a fault.
_MAX_NOTES = 3


@dataclass(frozen=True, slots=True)
class Note:
    """One observation of a check, and the *action* to take, "" if none is needed.

    A note with *is_context* is printed last, whatever the status of the others.
    """

    status: Status
    what: str
    action: str = ""
    is_context: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check *check*: its worst status, its observations, and one action."""

    check: str
    status: Status
    what: str
    action: str

    def without(self, root: str) -> Finding:
        """Return this finding with paths of the host instead of paths below its tree *root*."""
        if root == "/":
            return self
        return replace(self, what=_without(root, self.what), action=_without(root, self.action))

    def line(self, *, color: bool = False) -> str:
        """Return this finding as one line; with *color*, its status is colored."""
        status = f"{self.status:<4}"
        if color:
            status = f"\x1b[{_COLORS[self.status]}m{status}\x1b[0m"
        text = f"{status}  {self.check:<14}  {escape(self.what)}"
        return f"{text}; {escape(self.action)}" if self.action else text


def _without(root: str, text: str) -> str:
    return text.replace(f'"{root}"', '"/"').replace(root, "")


def ok(what: str) -> Note:
    """Return a note about something that is in order."""
    return Note(OK, what)


def warn(what: str, action: str) -> Note:
    """Return a note about something that looks unintended, or affects some containers."""
    return Note(WARN, what, action)


def fail(what: str, action: str) -> Note:
    """Return a note about something that keeps containers from their GPUs."""
    return Note(FAIL, what, action)


def context(what: str) -> Note:
    """Return a note about what was checked, which is printed with every status."""
    return Note(OK, what, is_context=True)


def combine(check: str, notes: Iterable[Note]) -> Finding:
    """Return the finding of *notes*: the worst first, with the action of the first."""
    notes = list(notes)
    ordered = sorted(
        (note for note in notes if not note.is_context), key=lambda note: _RANK[note.status]
    )
    worst = ordered[0] if ordered else Note(OK, "nothing to report")
    shown = [note for note in ordered if note.status != OK] or ordered or [worst]
    parts = [note.what for note in shown[:_MAX_NOTES]]
    if len(shown) > _MAX_NOTES:
        parts.append(f"and {len(shown) - _MAX_NOTES} more")
    parts += [note.what for note in notes if note.is_context]
    return Finding(check, worst.status, "; ".join(parts), worst.action)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return *findings* with failures first, then warnings; otherwise in the same order."""
    return sorted(findings, key=lambda finding: _RANK[finding.status])


def summary(findings: Sequence[Finding]) -> str:
    """Return one line that counts *findings* by status."""
    count = {status: sum(item.status == status for item in findings) for status in _RANK}
    return (
        f"{_plural(len(findings), 'check')}: {count[FAIL]} failed, "
        f"{_plural(count[WARN], 'warning')}, {count[OK]} ok"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0 if every check is ok, 1 if there are only warnings, 2 if a check failed."""
    return 2 - min((_RANK[finding.status] for finding in findings), default=2)
