# SPDX-License-Identifier: Apache-2.0
"""Check whether what the device plugin answers reaches containers, and stays there; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpunode.config import settings
from gpuruntime.cli.checks import nodes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, fail, ok, warn

CPU_MANAGER_STATE = "/var/lib/kubelet/cpu_manager_state"
_STATIC = "static"
# With these alone the engine does not know the device nodes of a container.
_UNKNOWN_TO_ENGINE = (settings.ENVVAR, settings.VOLUME_MOUNTS)


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
    is_unknown = not plan.pass_device_specs and any(
        strategy in _UNKNOWN_TO_ENGINE for strategy in plan.strategies
    )
    names = ", ".join(plan.strategies)
    if is_unknown and cpu_manager_policy(machine) == _STATIC:
        yield warn(
            f"the kubelet's CPU manager is static and devices are delivered by {names}: when it "
            "updates a container, the container loses its GPU",
            "use --pass-device-specs, or --device-list-strategy=cdi-cri",
        )
    if is_unknown:
        yield from (note for note in nodes.dev_char(machine) if note.status != ok("").status)
    if not plan.problems:
        yield ok(f"devices are delivered by {names}: {plan.reason}")


def cpu_manager_policy(machine: ExaminedMachine) -> str:
    """Return the policy of the kubelet's CPU manager, "" if there is none."""
    try:
        state = json.loads(machine.read(CPU_MANAGER_STATE) or "")
    except (ValueError, RecursionError):
        return ""
    policy = state.get("policyName") if isinstance(state, dict) else None
    return policy if isinstance(policy, str) else ""
