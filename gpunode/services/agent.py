# SPDX-License-Identifier: Apache-2.0
"""The agent: runs services on one watcher, those without rights in a child.

This process is root. It parses nothing but its config files, what the driver and the kubelet's
device manager send, and the child's requests and answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

from gpunode.services.config_choice import ConfigChoice
from gpunode.services.service_group import ServiceGroup
from gpunode.services.turns import STOP_SIGNALS
from gpunode.services.unprivileged import Unprivileged
from gpunode.watch.watcher import Watcher

CHILD = "unprivileged"
# How long the child runs on while services end, which may need it.
_STOP_S = 2.5


class Agent:
    """The services of *group* on *watcher*, and *child*, None if no service is without rights.

    *choice* is the config file that the services use.
    """

    def __init__(
        self,
        watcher: Watcher,
        group: ServiceGroup,
        choice: ConfigChoice,
        child: Unprivileged | None = None,
    ) -> None:
        self.watcher = watcher
        self.group = group
        self.choice = choice
        self.child = child
        self.reloads = 0
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal; raise the error of a config that cannot be used at start."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        if self.choice.path:
            self.group.prepare()
        async with self.watcher, self._running():
            await self._stop.wait()

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.group.serve())]
        if self.child is not None:
            tasks.append(asyncio.create_task(self.child.serve()))
        try:
            yield
        finally:
            self.group.stop()
            # The manager of MIG restores operands by its child.
            await asyncio.wait(tasks[:1], timeout=_STOP_S)
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def reload(self) -> None:
        """Have each service read its config again; what does not change goes on."""
        self.reloads += 1
        self.choice.check()
        self.group.reload()
        self.send_config()

    def send_config(self) -> None:
        """Have the services of the child read the config in force."""
        if self.child is not None and self.choice.path:
            self.child.send({"config": self.choice.path})

    def report(self) -> dict[str, Any]:
        """Return the state of this process and its services, as JSON for the child's pages."""
        processes = {}
        if self.child is not None:
            processes[CHILD] = {"restarts": self.child.restarts, "last_end": self.child.last_end}
        return {
            "services": {
                name: {"reasons": list(report.reasons), "details": dict(report.details)}
                for name, report in self.group.reports().items()
            },
            "processes": processes,
            "config": self.choice.report(),
            "reloads": self.reloads,
            "usage": usage(),
        }


def usage() -> dict[str, float]:
    """Return the resident memory and the processor time of this process."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        pages = int(stream.read().split()[1])
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "cpu_s": time.process_time()}
