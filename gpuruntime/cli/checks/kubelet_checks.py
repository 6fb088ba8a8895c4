# SPDX-License-Identifier: Apache-2.0
"""Checks of what a device plugin's answers become in the kubelet and the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

from gpuruntime.cli.checks import processes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, ok, warn
from gpuruntime.cli.checks.processes import Process

STATE = "/var/lib/kubelet/cpu_manager_state"
STATIC = "static"
_PLUGINS = ("nvidia-device-plugin", "nvidia-device-p", "gpu-node")
_STRATEGY, _SPECS = "device-list-strategy", "pass-device-specs"
_CDI, _VARIABLE = "cdi-", "envvar"
_MIG_SOCKETS = ("/var/lib/kubelet/device-plugins", "nvidia-mig-*.sock")
_TRUE = ("", "1", "t", "T", "true", "TRUE", "True")


def delivery(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether pods keep GPUs that they get by environment variables or mounts."""
    plugins = [
        process
        for process in processes.running(machine, *_PLUGINS)
        if process.name != "gpu-node" or "device-plugin" in process.words
    ]
    if not plugins:
        yield ok("no device plugin runs")
        return
    for plugin in plugins:
        strategies = _setting(machine, plugin, _STRATEGY) or _VARIABLE
        knows_nodes = _CDI in strategies or _passes_nodes(machine, plugin)
        if knows_nodes:
            yield ok(f"the engine knows the device nodes of pods ({strategies})")
        elif cpu_manager_policy(machine.read(STATE) or "") == STATIC:
            yield warn(
                f"the kubelet's CPU manager is static, and the device plugin delivers by "
                f"{strategies}: when the kubelet updates a container, it loses its GPU",
                f'start the device plugin with "--{_SPECS}", or "--{_STRATEGY}=cdi-cri"',
            )
        else:
            yield ok(f"the device plugin delivers by {strategies}")
        if strategies == _VARIABLE and len(machine.glob(*_MIG_SOCKETS)) > 1:
            yield warn(
                "the device plugin delivers by envvar: a container that requests MIG devices of "
                "two profiles sees those of one",
                f'start the device plugin with "--{_STRATEGY}=cdi-cri", or "volume-mounts"',
            )


def cpu_manager_policy(text: str) -> str:
    """Return the policy in *text*, the state of the kubelet's CPU manager, "" if there is none."""
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    policy = state.get("policyName") if isinstance(state, dict) else None
    return policy if isinstance(policy, str) else ""


def _setting(machine: ExaminedMachine, plugin: Process, option: str) -> str:
    """Return the value of *option* of the device plugin, or of its variable."""
    variable = option.upper().replace("-", "_")
    value = plugin.option(f"--{option}")
    return value or processes.environment(machine, plugin).get(variable, "")


def _passes_nodes(machine: ExaminedMachine, plugin: Process) -> bool:
    if f"--{_SPECS}" in plugin.words:
        return True
    value = _setting(machine, plugin, _SPECS)
    return bool(value) and value in _TRUE
