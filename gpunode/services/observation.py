# SPDX-License-Identifier: Apache-2.0
"""What a service needs of a watcher, which may be its own, or that of the agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gpunode.model import Telemetry, Update
from gpunode.plugin_spec import Roots
from gpunode.watch.watcher import Watcher


class Observed(Protocol):
    """What a service needs of a watcher to wait for its updates."""

    @property
    def current(self) -> Update:
        """The last update, without events."""
        ...

    def updates(self) -> AsyncIterator[Update]:
        """Yield the current state, then an update after each change."""
        ...


class Measuring(Observed, Protocol):
    """A watcher that measures."""

    def request_telemetry(self) -> Telemetry | None:
        """Return the last measurements, None before the first; have them made from now on."""
        ...


class Holdable(Protocol):
    """A watcher that can be without a process that calls NVML."""

    async def hold(self) -> None:
        """End the process."""
        ...

    def resume(self) -> None:
        """Start it again."""
        ...


# Returns a watcher as a context.
Watch = Callable[[Roots], AbstractAsyncContextManager[Observed]]


def watcher(here: Roots) -> Watcher:
    """Return a watcher of the driver and the device nodes of *here*."""
    return Watcher(driver_root=here.driver, dev_root=here.dev)
