# SPDX-License-Identifier: Apache-2.0
"""The agent: runs services on one watcher, with one server of probes and of its own metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any, Protocol

from gpunode import exposition
from gpunode.metric_table import COUNTER, GAUGE, Metric
from gpunode.metrics import Family
from gpunode.services.healthz import Report, routes
from gpunode.services.http_server import Answer, HttpServer
from gpunode.services.shared_watcher import Relay
from gpunode.services.turns import STOP_SIGNALS, Turns
from gpunode.watch.watcher import Watcher
from gpuruntime.errors import GpuRuntimeError

log = logging.getLogger(__name__)

EXPORTER = "exporter"
_STOP_S = 2.0
_SOURCE = "gpu-node"
_READY = Metric("gpu_node_service_ready", GAUGE, "1 if the service does all of its work.", _SOURCE)
_RELOADS = Metric("gpu_node_reloads", COUNTER, "Times that configs were read again.", _SOURCE)
_MEMORY = Metric(
    "gpu_node_resident_memory_bytes", GAUGE, "Resident memory of the process agent.", _SOURCE
)
_CPU = Metric("gpu_node_cpu_seconds", COUNTER, "CPU time of the process agent.", _SOURCE)


class ServiceEndError(GpuRuntimeError):
    """A service of the agent has ended by itself."""

    phase = "agent"


class Service(Protocol):
    """A service that can run with others."""

    turns: Turns

    async def serve(self) -> None:
        """Serve until `turns` ends; raise GpuRuntimeError."""
        ...

    def report(self) -> Report:
        """Return the state of the service."""
        ...


class Agent:
    """The *services* on *watcher*.

    *exporter* is the process id of the exporter and the socket on which it gets the updates, None
    without an exporter.
    """

    def __init__(
        self,
        watcher: Watcher,
        services: Mapping[str, Service],
        exporter: tuple[int, socket.socket] | None = None,
        *,
        healthz: str = "",
    ) -> None:
        self.watcher = watcher
        self.services = services
        self.exporter_pid = exporter[0] if exporter else None
        self.relay = Relay(watcher, exporter[1]) if exporter else None
        self.reloads = 0
        self._stop = asyncio.Event()
        pages = {"/metrics": self._metrics, **routes(self.report)}
        self.server = HttpServer(healthz, "healthz", pages) if healthz else None

    async def run(self) -> None:
        """Serve until a signal, or until a service ends by itself, whose error is raised."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        if self.server is not None:
            await self.server.start()
        try:
            async with self.watcher:
                await self._serve()
        finally:
            self._end_exporter()
            if self.server is not None:
                await self.server.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = {
            asyncio.create_task(service.serve(), name=name)
            for name, service in self.services.items()
        }
        if self.relay is not None:
            tasks.add(asyncio.create_task(self.relay.serve(), name=EXPORTER))
        stop = asyncio.ensure_future(self._stop.wait())
        waiting: set[asyncio.Future[Any]] = {stop, *tasks}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task not in done:
                    continue
                # Raises the error of the service.
                task.result()
                if stop not in done:
                    raise ServiceEndError(
                        f"the service {task.get_name()} has ended", "look at its log lines above"
                    )
        finally:
            for service in self.services.values():
                service.turns.stop()
            self._end_exporter()
            _, late = await asyncio.wait(tasks, timeout=_STOP_S)
            stop.cancel()
            for task in late:
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)

    def reload(self) -> None:
        """Have each service read its config again; what does not change goes on."""
        self.reloads += 1
        for service in self.services.values():
            service.turns.reload()

    def _end_exporter(self) -> None:
        """Have the exporter end; it also ends with this process."""
        if self.exporter_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.exporter_pid, signal.SIGTERM)
            self.exporter_pid = None

    def report(self) -> Report:
        """Return the state of all services; reasons begin with the name of their service."""
        reasons: list[str] = []
        details: dict[str, Any] = {}
        for name, service in self.services.items():
            report = service.report()
            reasons += [f"{name}: {reason}" for reason in report.reasons]
            details[name] = {"ready": report.is_ready, **report.details}
        if self.relay is not None:
            details[EXPORTER] = {"ready": bool(self.relay.is_ready)}
            if not self.relay.is_ready:
                reasons.append(f"{EXPORTER}: not ready; its own /readyz has the reasons")
        return Report(tuple(reasons), {"services": details})

    def _metrics(self) -> Answer:
        services = self.report().details["services"]
        ready = tuple(
            ({"service": name}, float(state["ready"])) for name, state in services.items()
        )
        families = (
            Family(_READY, ready),
            Family(_RELOADS, (({}, float(self.reloads)),)),
            Family(_MEMORY, (({}, float(_resident_bytes())),)),
            Family(_CPU, (({}, time.process_time()),)),
        )
        return Answer(exposition.text(families), exposition.CONTENT_TYPE)


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
