# SPDX-License-Identifier: Apache-2.0
"""Run each check in a process of its own, so that it cannot break or delay the others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping

from gpuruntime import child_process
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import FAIL, Finding, Note, combine
from gpuruntime.errors import GpuRuntimeError, bug

Check = Callable[[ExaminedMachine], Iterable[Note]]
_ANSWER_BYTES = 8 << 20


def run(checks: Mapping[str, Check], machine: ExaminedMachine, deadline_s: float) -> list[Finding]:
    """Return what *checks* find on *machine*, in their order; each has *deadline_s* in all.

    A check that raises, dies or hangs is a failure of its own name. To be called where there is
    one thread.
    """
    # Ignored, it would have the kernel wait for our children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A check may start programs, which end with it.
    children = [_start(name, check, machine) for name, check in checks.items()]
    outcomes = child_process.finish(children, deadline_s, _ANSWER_BYTES)
    return [_finding(name, outcome, deadline_s) for name, outcome in zip(checks, outcomes)]


def _start(name: str, check: Check, machine: ExaminedMachine) -> child_process.Child:
    return child_process.fork(lambda fd: _answer(name, check, machine, fd))


def _answer(name: str, check: Check, machine: ExaminedMachine, fd: int) -> int:
    """Be the child: write the finding, and return the exit status."""
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
    except Exception as error:  # noqa: BLE001 (of one check: the others go on)
        return Finding(name, FAIL, bug(error).message, "report it with this line")


def _finding(name: str, outcome: child_process.Outcome, deadline_s: float) -> Finding:
    """Return the finding that a check with *outcome* wrote."""
    if outcome.how == child_process.LATE:
        return Finding(
            name,
            FAIL,
            f"no answer in {deadline_s:g} s: something of the host hangs",
            'look for hung tasks, NVRM and Xid lines in "dmesg"',
        )
    try:
        status, what, action = json.loads(outcome.output)
    except ValueError:
        return Finding(name, FAIL, "the check has died", "report it, with this line")
    return Finding(name, status, what, action)
