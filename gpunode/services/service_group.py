# SPDX-License-Identifier: Apache-2.0
"""Services of one process: one that ends is started again, and never ends the others."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpunode.services.back_off import BackOff
from gpunode.services.config_choice import NotChosenError
from gpunode.services.healthz import Report
from gpunode.services.turns import Turns
from gpuruntime.errors import GpuRuntimeError, bug

log = logging.getLogger(__name__)

# A signal ends a process within five seconds.
_STOP_S = 2.0


class Service(Protocol):
    """A service that can run with others."""

    turns: Turns

    async def serve(self) -> None:
        """Serve until `turns` ends; raise GpuRuntimeError."""
        ...

    def report(self) -> Report:
        """Return the state of the service."""
        ...


@dataclass(slots=True)
class _Member:
    """A service by its name; *service* is None while it does not run, *problem* says why."""

    make: Callable[[], Service]
    service: Service | None = None
    problem: str = "it has not been started yet"
    restarts: int = 0
    back_off: BackOff = field(default_factory=lambda: BackOff(draw=random.random))
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ServiceGroup:
    """The services that *makers* return, by their names."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Service]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._members = {name: _Member(make) for name, make in makers.items()}
        self._stop = asyncio.Event()

    def prepare(self) -> None:
        """Make all services, so that an error of a config ends the program; raise that error."""
        for member in self._members.values():
            member.service = member.make()

    async def serve(self) -> None:
        """Run the services, which may be none, until `stop`."""
        tasks = [
            asyncio.create_task(self._keep(name, member)) for name, member in self._members.items()
        ]
        try:
            await asyncio.gather(self._stop.wait(), *tasks)
        finally:
            self.stop()
            if tasks:
                await asyncio.wait(tasks, timeout=_STOP_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, member: _Member) -> None:
        while not self._stop.is_set():
            start = self.clock()
            requested_s = 0.0
            member.wake.clear()
            try:
                if member.service is None:
                    member.service = member.make()
                await member.service.serve()
                problem, lines = "it has ended", "it has ended"
            except NotChosenError as error:
                # The choice is a reload.
                member.problem = str(error)
                await self._pause(member, None)
                continue
            except GpuRuntimeError as error:
                problem, lines = str(error), error.lines()
                requested_s = getattr(error, "retry_after_s", 0.0)
            except Exception as error:  # noqa: BLE001 (of one service; the others go on)
                problem, lines = str(bug(error)), bug(error).lines()
            member.service = None
            if self._stop.is_set():
                return
            if problem != member.problem:
                log.error("%s: %s", name, lines)
            member.problem = problem
            member.restarts += 1
            delay_s = member.back_off.delay(self.clock() - start)
            await self._pause(member, requested_s + delay_s)

    async def _pause(self, member: _Member, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await member.wake.wait()
        except TimeoutError:
            pass
        member.wake.clear()

    def stop(self) -> None:
        """End all services."""
        self._stop.set()
        for member in self._members.values():
            member.wake.set()
            if member.service is not None:
                member.service.turns.stop()

    def reload(self) -> None:
        """Have each service read its config again; one that does not run is started again."""
        for member in self._members.values():
            member.wake.set()
            if member.service is not None:
                member.service.turns.reload()

    def reports(self) -> dict[str, Report]:
        """Return the state of each service; its details say how often it was started again."""
        return {name: _report(member) for name, member in self._members.items()}


def _report(member: _Member) -> Report:
    if member.service is None:
        return Report((member.problem,), {"restarts": member.restarts})
    report = member.service.report()
    details: dict[str, Any] = {"restarts": member.restarts}
    if member.restarts:
        details["last_end"] = member.problem
    return Report(report.reasons, {**report.details, **details})
