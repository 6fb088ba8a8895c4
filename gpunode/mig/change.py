# SPDX-License-Identifier: Apache-2.0
"""One change of this host, as a command or the manager makes it: hooks, recovery, the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpunode.mig.commands import HookFile
from gpunode.mig.engine import Engine
from gpunode.mig.host import Host
from gpunode.mig.states import Target
from gpuruntime.errors import GpuRuntimeError

TargetsOf = Callable[[Sequence[Mapping[str, Any]]], Mapping[int, Target]]
Warn = Callable[[str], None]

_RECOVERED = "the change that was cut off is undone"


def apply(
    host: Host, targets_of: TargetsOf, hooks: HookFile, warn: Warn, *, skip_reset: bool = False
) -> bool:
    """Change the GPUs to what *targets_of* returns for their state; return whether they changed.

    A change that was cut off is ended first. The caller holds the lock of the state directory.
    *warn* gets what the user has to know beside the result.
    Raises GpuRuntimeError; the hooks of `apply-exit` run in any case.
    """
    engine = Engine(host.writer, host.state_directory, None if skip_reset else host.reset, hooks)
    try:
        hooks.run("apply-start")
        if engine.recover():
            warn(_RECOVERED)
        with host.writer() as writer:
            is_changed = engine.apply(writer, targets_of(writer.call("state")))
    except GpuRuntimeError:
        try:
            hooks.run("apply-exit")
        except GpuRuntimeError as second:
            # The first error is the cause.
            warn(second.lines())
        raise
    hooks.run("apply-exit")
    return is_changed


def recover(host: Host, warn: Warn) -> None:
    """End a change that was cut off; the caller holds the lock. Raises GpuRuntimeError."""
    if Engine(host.writer, host.state_directory, host.reset, HookFile("", {})).recover():
        warn(_RECOVERED)
