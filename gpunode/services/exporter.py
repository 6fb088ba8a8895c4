# SPDX-License-Identifier: Apache-2.0
"""The exporter: metrics of the GPUs for Prometheus, with the pods that use them.

A scrape is answered from the last values, at once: those of the driver from the watcher, the pods
from the last list of the kubelet, which is asked again in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from gpunode import exposition
from gpunode.idle import IdleTimes
from gpunode.metrics import NodeState, Settings, families
from gpunode.model import DriverState, DriverStatus, EventKind, NodeModel, Telemetry, Update
from gpunode.pod_devices import Container, Use, Uses
from gpunode.pod_processes import LOGS, pod_of, pods_by_uid
from gpunode.services.healthz import Report, routes
from gpunode.services.http_server import Answer, HttpServer
from gpunode.services.observation import Measuring
from gpunode.services.turns import Turns
from gpuruntime.errors import GpuRuntimeError

log = logging.getLogger(__name__)

# The watcher measures with each of its polls while this service asks for values.
_INTERVAL_S = 10.0
# Until the values of the first poll are there, so that they are not missing for a whole interval.
_FIRST_INTERVAL_S = 0.5


class PodSource(Protocol):
    """Where the list of containers with devices comes from."""

    async def containers(self) -> Sequence[Container]:
        """Return the containers; raise GpuRuntimeError."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the service. *resources* are names of further resources with GPUs."""

    listen: str = ":9400"
    settings: Settings = field(default_factory=Settings)
    resources: tuple[str, ...] = ()
    proc: str = "/proc"
    pod_logs: str = LOGS


class Exporter:
    """The service. *pods* is None if the kubelet is not asked."""

    def __init__(
        self,
        watch: Callable[[], AbstractAsyncContextManager[Measuring]],
        pods: PodSource | None,
        options: Options | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watch = watch
        self.pods = pods
        self.options = options or Options()
        self.clock = clock
        self.turns = Turns()
        self.status = DriverStatus(DriverState.STARTING, clock())
        self.model: NodeModel | None = None
        self.telemetry: Telemetry | None = None
        self._measured_at = clock()
        self.containers: Sequence[Container] | None = None
        self.pods_problem = "the kubelet has not been asked yet"
        self._pods_by_uid: dict[str, tuple[str, str]] = {}
        self.idle = IdleTimes()
        self.last_xids: dict[str, int] = {}
        self.server = HttpServer(
            self.options.listen, "--listen", {"/metrics": self._metrics, **routes(self.report)}
        )

    async def serve(self) -> None:
        """Serve until `turns` ends; raise HttpError."""
        asking = asyncio.create_task(self._ask_for_pods())
        try:
            async with self.server, self.watch() as observed:
                async for turn in self.turns.of(observed, self._timeout):
                    self.take(turn.update, observed.request_telemetry())
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking

    def _timeout(self) -> float:
        """Return the seconds until the next look at the watcher's values without an update."""
        is_first = self.telemetry is None and self.model is not None and bool(self.model.gpus)
        return _FIRST_INTERVAL_S if is_first else _INTERVAL_S

    async def once(self) -> bytes:
        """Return one scrape, after the first answer of driver and kubelet, or their failure."""
        async with self.watch() as observed:
            async for turn in self.turns.of(observed, lambda: 0.1):
                self.take(turn.update, observed.request_telemetry())
                is_measured = self.telemetry is not None or not (
                    self.model is not None and self.model.gpus
                )
                if self.status.state is not DriverState.STARTING and is_measured:
                    break
        if self.pods is not None:
            await self._list_pods()
        return self.scrape()

    def take(self, update: Update, telemetry: Telemetry | None) -> None:
        """Take note of what the watcher reports."""
        if (update.status.state, update.status.reason) != (self.status.state, self.status.reason):
            reason = f": {update.status.reason}" if update.status.reason else ""
            log.info("the driver is %s%s", update.status.state.value, reason)
        self.status, self.model = update.status, update.model
        for event in update.events:
            if event.kind is EventKind.XID and event.uuid:
                self.last_xids[event.uuid] = event.xid
        if telemetry is not None:
            self.telemetry = telemetry
            self._measured_at = self.clock() - telemetry.age_s
            self.idle.observe(telemetry, self.clock())

    async def _ask_for_pods(self) -> None:
        """Ask the kubelet for the pods, at every interval."""
        while self.pods is not None:
            await self._list_pods()
            await asyncio.sleep(_INTERVAL_S)

    async def _list_pods(self) -> None:
        assert self.pods is not None
        try:
            self.containers = await self.pods.containers()
        except GpuRuntimeError as error:
            if self.pods_problem != str(error):
                log.warning("%s", error.lines())
            self.pods_problem = str(error)
            self.containers = None
        else:
            self.pods_problem = ""
            self._pods_by_uid = await asyncio.to_thread(pods_by_uid, self.options.pod_logs)

    def scrape(self) -> bytes:
        """Return the metrics in the text format, from the last values."""
        telemetry = self.telemetry
        if telemetry is not None:
            telemetry = Telemetry(self.clock() - self._measured_at, telemetry.devices)
        uses = None
        if self.model is not None and self.containers is not None:
            uses = Uses(self.model.gpus, self.containers, self.options.resources)
        state = NodeState(
            self.status,
            self.model,
            telemetry,
            uses,
            self.idle.seconds(self.clock()),
            self.last_xids,
            self._process_uses(telemetry, uses),
        )
        return exposition.text(families(state, self.options.settings))

    def _process_uses(self, telemetry: Telemetry | None, uses: Uses | None) -> dict[int, Use]:
        """Return the use that each process belongs to, by the UID of its pod's cgroup."""
        if telemetry is None or uses is None:
            return {}
        process_uses = {}
        for device in telemetry.devices:
            of_device = uses.of(device.uuid)
            pods = {(use.namespace, use.pod) for use in of_device}
            for process in device.processes:
                uid = pod_of(process.pid, self.options.proc)
                owner = self._pods_by_uid.get(uid)
                if owner is None and uid and len(pods) == 1:
                    # Without logs, a process of a pod is one of the only pod of its device.
                    (owner,) = pods
                use = next((u for u in of_device if (u.namespace, u.pod) == owner), None)
                if use is not None:
                    process_uses[process.pid] = use
        return process_uses

    def _metrics(self) -> Answer:
        return Answer(self.scrape(), exposition.CONTENT_TYPE)

    def report(self) -> Report:
        """Return the state of the service for probes."""
        reasons = []
        if self.status.state is not DriverState.READY:
            text = f": {self.status.reason}" if self.status.reason else ""
            reasons.append(f"the driver is {self.status.state.value}{text}")
        if self.pods is not None and self.pods_problem:
            reasons.append(self.pods_problem)
        return Report(tuple(reasons), {"gpus": len(self.model.gpus) if self.model else 0})
