# SPDX-License-Identifier: Apache-2.0
"""The device plugin: offers the GPUs of this node to the kubelet.

One task waits for updates of the watcher, for signals and for the time at which a fault may end,
and publishes what follows. Calls of the kubelet are answered from what is published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpunode import devices, engine
from gpunode.config import settings
from gpunode.config.effective import Config
from gpunode.config.sharing import SharingKind
from gpunode.delivery import CDI_STRATEGIES, Delivery
from gpunode.kubelet.registration import Registrar
from gpunode.kubelet.sockets import KubeletError
from gpunode.model import DriverState, Event, EventKind, Update
from gpunode.services.delivery_choice import DeliveryChoice
from gpunode.services.healthz import Report
from gpunode.services.mps_gate import MpsGate
from gpunode.services.observation import Watch, watcher
from gpunode.services.plugin_state import PluginState
from gpunode.services.resource_backend import Published, ResourceBackend
from gpunode.services.spec_files import SpecFiles, roots
from gpunode.services.turns import Turns
from gpunode.xid_table import XIDS
from gpuruntime.errors import ConfigError, DriverError, GpuRuntimeError, bug, escape

log = logging.getLogger(__name__)

# Settings that are in use until the end of the process.
_FIXED = (
    *("kubelet_socket", "nvidia_driver_root", "nvidia_dev_root", "container_driver_root"),
    *("device_list_strategy", "cri_socket"),
)
_RETRY_S = 30.0
_STOP_S = 2.0
_MAX_CRASHES, _CRASH_PERIOD_S = 5, 3600.0


class DevicePlugin:
    """The service; *load* returns the config in force, or raises ConfigError."""

    def __init__(
        self,
        load: Callable[[], Config],
        *,
        watch: Watch = watcher,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load = load
        self.watch = watch
        self.config = load()
        self.delivery_choice = DeliveryChoice(self.config)
        self.clock = clock
        self.state = PluginState(self.config, environment)
        self.turns = Turns()
        self.registrar = Registrar(self.config.kubelet_socket)
        self.specs = SpecFiles()
        self.mps_gate = MpsGate()
        self.backends: dict[str, ResourceBackend] = {}
        self.config_problem = ""
        self.serve_problems: dict[str, str] = {}
        # Whether the state at start was one that could be served.
        self._is_started = False
        self._retry_at: float | None = None
        # When an engine that has not answered is asked again.
        self._ask_at = 0.0
        self._reasons: dict[str, str] = {}
        self._problems: tuple[str, ...] = ()

    async def serve(self) -> None:
        """Serve until `turns` ends.

        Raises KubeletError if the kubelet's directory cannot be used, DriverError or LayoutError
        if nothing can be offered at start and the config says that this is an error, and the error
        of a bug that occurs too often.
        """
        for sentence in (*self.config.warnings, *self.state.policy.problems):
            log.warning("%s", sentence)
        self.registrar.check()
        try:
            await self._supervise()
        finally:
            await self._close()

    async def _close(self) -> None:
        """Remove the sockets and end the servers; a second call does nothing."""
        for backend in self.backends.values():
            backend.end()
        self.backends.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self.registrar.close()

    async def _supervise(self) -> None:
        """Serve; begin again with new servers after a bug, unless it occurs too often."""
        crashes: deque[float] = deque()
        while True:
            try:
                await self._serve()
            except GpuRuntimeError:
                raise
            except Exception as error:
                now = self.clock()
                crashes.append(now)
                while crashes[0] < now - _CRASH_PERIOD_S:
                    crashes.popleft()
                if len(crashes) > _MAX_CRASHES:
                    raise bug(error) from error
                log.error("%s", bug(error).lines())
                await self._close()
                self.registrar = Registrar(self.config.kubelet_socket)
            else:
                return

    async def _serve(self) -> None:
        async with self.watch(roots(self.config)) as observed:
            turns = self.turns.of(observed, self._timeout, lambda: self.registrar.task)
            async with contextlib.aclosing(turns):
                async for turn in turns:
                    if turn.is_reload:
                        self._load_again()
                    await self._take(turn.update)
            # The sockets first: a driver that hangs delays the end of the watcher.
            await self._close()

    def _timeout(self) -> float | None:
        """Return how long nothing may have to be done, None if nothing is to come by itself."""
        times = [self.state.health.next_change(), self._retry_at]
        pending = [moment for moment in times if moment is not None]
        return max(min(pending) - self.clock(), 0.0) if pending else None

    async def _take(self, update: Update) -> None:
        """Publish what follows from *update*."""
        before = self.state.status
        for event in update.events:
            self._log_event(event)
        self.state.advance(update, self.clock())
        status = self.state.status
        if (status.state, status.reason) != (before.state, before.reason):
            level = logging.INFO if status.state is DriverState.READY else logging.WARNING
            reason = f": {status.reason}" if status.reason else ""
            log.log(level, "the driver is %s%s", status.state.value, reason)
        self._check_start()
        await self._publish()

    def _check_start(self) -> None:
        """Raise the reason why nothing can be offered at start, if the config says so."""
        status = self.state.status
        if self._is_started or not self.config.fail_on_init_error:
            return
        if status.state not in (DriverState.READY, DriverState.STARTING):
            raise DriverError(
                f"the driver is {status.state.value}: {status.reason or 'no answer'}",
                status.hint or "start this service again with --fail-on-init-error=false to wait",
            )
        if self.state.layout_error is not None:
            raise self.state.layout_error

    async def _publish(self) -> None:
        """Bring the servers, their units and the CDI specs in line with the state."""
        config = self.state.config
        self._retry_at = None
        model = self.state.model
        inventory = model.inventory if model else None
        await self._choose_delivery()
        strategies = self.delivery_choice.strategies
        if any(strategy in CDI_STRATEGIES for strategy in strategies):
            await self.specs.update(inventory, config)
            if self.specs.problem is not None:
                if config.fail_on_init_error and not self._is_started:
                    raise self.specs.problem
                self._retry_at = self.clock() + _RETRY_S
        delivery = Delivery(config, strategies, self.specs.names, inventory)
        published = await self._with_mps(self.state.published(delivery))
        for name in [name for name in self.backends if name not in published]:
            self.backends.pop(name).end()
            await self.registrar.remove(name)
        await self._serve_resources(published)
        self._log_changes(delivery)

    async def _with_mps(self, published: dict[str, Published]) -> dict[str, Published]:
        """Return *published* as the MPS control daemons answer.

        A resource whose daemon has never answered is left out; the units of one whose daemon no
        longer answers are unhealthy.
        """
        names = [
            name
            for name, content in published.items()
            if content.resource.sharing is SharingKind.MPS
        ]
        due = await self.mps_gate.check(names, self.state.config, self.clock())
        if due is not None:
            self._retry_at = due if self._retry_at is None else min(self._retry_at, due)
        result = dict(published)
        for name in self.mps_gate.problems:
            content = result.pop(name)
            if name in self.mps_gate.lost:
                units = tuple(replace(unit, healthy=False) for unit in content.units)
                result[name] = replace(content, units=units)
        return result

    async def _choose_delivery(self) -> None:
        """Ask the engine what it supports, again and again until it answers."""
        now = self.clock()
        if not self.delivery_choice.is_made and now >= self._ask_at:
            await self.delivery_choice.make()
            self._ask_at = self.clock() + _RETRY_S
        if not self.delivery_choice.is_made:
            self._retry_at = self._ask_at

    async def _serve_resources(self, published: Mapping[str, Published]) -> None:
        """Publish the content of each resource, with a new server for a new one."""
        self.serve_problems.clear()
        for name, content in published.items():
            if name in self.backends:
                self.backends[name].publish(content)
                continue
            backend = ResourceBackend(content)
            try:
                await self.registrar.add(backend)
            except KubeletError as error:
                if not self._is_started:
                    raise
                log.error("%s: %s", name, error.lines())
                self.serve_problems[name] = str(error)
                self._retry_at = self.clock() + _RETRY_S
                continue
            self.backends[name] = backend
            log.info("%s: %d units", name, len(content.units))
        if self.state.status.state is DriverState.READY and self.state.layout_error is None:
            self._is_started = True

    def _log_changes(self, delivery: Delivery) -> None:
        """Write a line for each device whose health has changed, and for each new problem."""
        reasons = self.state.unhealthy(delivery)
        for uuid in [uuid for uuid in self._reasons if uuid not in reasons]:
            log.info("%s is healthy", uuid)
        for uuid, reason in reasons.items():
            if self._reasons.get(uuid) != reason:
                log.warning("%s is unhealthy: %s", uuid, reason)
        self._reasons = reasons
        problems = self._all_problems()
        for sentence in problems:
            if sentence not in self._problems:
                log.warning("%s", sentence)
        self._problems = problems
        if not self.backends and self.state.model is not None and not problems:
            log.info("no devices found; waiting")

    def _all_problems(self) -> tuple[str, ...]:
        error = self.state.layout_error
        layout = (str(error),) if error is not None else ()
        model = self.state.model
        names = [resource.name for resource in self.state.offer.resources]
        overwritten = engine.overwritten(self.delivery_choice.strategies, names)
        of_engine = (*self.delivery_choice.problems, *([overwritten] if overwritten else ()))
        of_driver = (*model.problems, *map(str, model.left_out)) if model is not None else ()
        return (
            *of_engine,
            *of_driver,
            *layout,
            *self.state.offer.problems,
            *self.state.scores.problems,
        )

    def _log_event(self, event: Event) -> None:
        if event.kind is EventKind.XID:
            details = XIDS.get(event.xid)
            name = f" ({details.name})" if details else ""
            effect = "" if self.state.policy.acts_on(event.xid) else "; it is ignored"
            log.warning("%s: XID %d%s%s", event.uuid, event.xid, name, effect)
        else:
            text = f": {escape(event.text)}" if event.text else ""
            log.warning("%s: %s%s", event.uuid or "all GPUs", event.kind.value, text)

    def _load_again(self) -> None:
        """Use the config as it is now; keep the one in force if the new one cannot be used."""
        try:
            config = self.load()
            fixed = {
                name: getattr(self.config, name)
                for name in _FIXED
                if getattr(self.config, name) != getattr(config, name)
            }
            for name in fixed:
                option = settings.BY_NAME[name].option
                log.warning("the new --%s takes effect when this service is restarted", option)
            config = replace(config, **fixed)
            self.state.set_config(config)
        except (ConfigError, devices.LayoutError) as error:
            self.config_problem = str(error)
            log.error("the new config is not used: %s", error.lines())
            return
        self.config_problem = ""
        self.config = config
        self._ask_at = 0.0
        for sentence in config.warnings:
            log.warning("%s", sentence)
        log.info("the config was read again")

    def report(self) -> Report:
        """Return the state of the service for probes."""
        status = self.state.status
        reasons = []
        if status.state is not DriverState.READY:
            text = f": {status.reason}" if status.reason else ""
            reasons.append(f"the driver is {status.state.value}{text}")
        if self.state.layout_error is not None:
            reasons.append(str(self.state.layout_error))
        if self.specs.problem is not None:
            reasons.append(str(self.specs.problem))
        reasons += self.serve_problems.values()
        reasons += self.mps_gate.problems.values()
        registered = {}
        for plugin in self.registrar.status():
            registered[plugin.resource_name] = plugin.is_connected
            if self.config.kubelet_socket and not plugin.is_connected:
                problem = plugin.problem or "not registered with the kubelet"
                reasons.append(f"{plugin.resource_name}: {problem}")
        resources = {
            name: {
                "units": len(backend.published.units),
                "healthy": sum(unit.healthy for unit in backend.published.units),
                "registered": registered.get(name, False),
            }
            for name, backend in self.backends.items()
        }
        details = {
            "driver": {
                "state": status.state.value,
                "seconds": round(max(self.clock() - status.since, 0.0), 1),
                "version": self.state.model.driver_version if self.state.model else "",
            },
            "strategies": list(self.delivery_choice.strategies),
            "delivery": self.delivery_choice.reason,
            "resources": resources,
            "unhealthy": self._reasons,
            "problems": list(self._all_problems()),
            "config_error": self.config_problem,
        }
        return Report(tuple(reasons), details)
