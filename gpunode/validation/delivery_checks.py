# SPDX-License-Identifier: Apache-2.0
"""Check whether what the device plugin answers reaches containers, and stays there; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpunode import engine
from gpuruntime.cli.checks import kubelet_checks, nodes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn


@dataclass(frozen=True, slots=True)
class Plan:
    """The device list strategies in force, why, and which of them cannot work."""

    strategies: Sequence[str]
    reason: str
    problems: Sequence[str] = ()
    pass_device_specs: bool = False


def delivery(machine: ExaminedMachine, plan: Plan) -> Iterator[Note]:
    """Check *plan* on *machine*."""
    for problem in plan.problems:
        sentence, _, action = problem.partition("; ")
        yield fail(sentence, action or "use another --device-list-strategy")
    passes_specs = plan.pass_device_specs
    names = ", ".join(plan.strategies)
    state = machine.read(kubelet_checks.STATE) or ""
    sentence, action = engine.lost_by_updates(plan.strategies, state, passes_specs=passes_specs)
    if sentence:
        yield warn(sentence, action)
    if not passes_specs and engine.hides_nodes(plan.strategies):
        yield from (note for note in nodes.dev_char(machine) if note.status != ok("").status)
    if not plan.problems:
        yield ok(f"devices are delivered by {names}: {plan.reason}")
