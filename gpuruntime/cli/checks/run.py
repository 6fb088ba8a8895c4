# SPDX-License-Identifier: Apache-2.0
"""Run each check in its own process, so that it cannot break or delay the others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping

from gpuruntime import child_process, remedies
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import FAIL, Finding, Note, combine
from gpuruntime.errors import GpuRuntimeError, bug

Check = Callable[[ExaminedMachine], Iterable[Note]]
_MAX_RESULT_BYTES = 8 << 20
_BUG_HINT = "report this line as a bug"


def run(checks: Mapping[str, Check], machine: ExaminedMachine, deadline_s: float) -> list[Finding]:
    """Return the findings of *checks* on *machine*, in their order, after *deadline_s* at most.

    A check that raises, dies or hangs has failed; the other checks continue. The caller must have
    one thread only.
    """
    # If the signal were ignored, the kernel would reap our children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Programs that a check has started end with its process.
    children = [_start(name, check, machine) for name, check in checks.items()]
    outcomes = child_process.finish(children, deadline_s, _MAX_RESULT_BYTES)
    return [_finding(name, outcome, deadline_s) for name, outcome in zip(checks, outcomes)]


def _start(name: str, check: Check, machine: ExaminedMachine) -> child_process.Child:
    return child_process.fork(lambda fd: _report(name, check, machine, fd))


def _report(name: str, check: Check, machine: ExaminedMachine, fd: int) -> int:
    """Write the finding to *fd*, in the child; return the exit status."""
    result = _examine(name, check, machine)
    data = json.dumps([result.status, result.what, result.action]).encode()
    while data:
        data = data[os.write(fd, data) :]
    return 0


def _examine(name: str, check: Check, machine: ExaminedMachine) -> Finding:
    try:
        return combine(name, check(machine)).without(machine.root)
    except GpuRuntimeError as error:
        return Finding(name, FAIL, error.message, error.hint or "").without(machine.root)
    except Exception as error:  # noqa: BLE001 (a bug in one check does not end the others)
        return Finding(name, FAIL, bug(error).message, _BUG_HINT)


def _finding(name: str, outcome: child_process.Outcome, deadline_s: float) -> Finding:
    """Return the finding of the check *name*, whose child ended with *outcome*."""
    if outcome.how == child_process.LATE:
        return Finding(
            name,
            FAIL,
            f"no result in {deadline_s:g} s: a part of the host hangs",
            remedies.CHECK_LOG,
        )
    try:
        status, what, action = json.loads(outcome.output)
    except ValueError:
        return Finding(name, FAIL, "the process of this check has died", _BUG_HINT)
    return Finding(name, status, what, action)
