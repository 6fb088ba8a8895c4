# SPDX-License-Identifier: Apache-2.0
"""Feature discovery: publishes the labels that describe this node's GPUs.

The labels of the last model stay while the driver does not answer, and when the service ends: a
node does not lose them in an upgrade.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpunode import labels, machine
from gpunode.config.effective import Config
from gpunode.config.sharing import DEFAULT_DOMAIN, SharingKind
from gpunode.model import DriverState, Update
from gpunode.services.back_off import BackOff
from gpunode.services.healthz import Report
from gpunode.services.observation import Watch, watcher
from gpunode.services.spec_files import roots
from gpunode.services.turns import Turns
from gpuruntime.errors import ConfigError, DriverError, GpuRuntimeError

log = logging.getLogger(__name__)

# Delays after a request that failed.
_FIRST_S, _MOST_S = 10.0, 600.0
_STRATEGIES = {SharingKind.TIME_SLICING: labels.TIME_SLICING, SharingKind.MPS: labels.MPS}


class Publisher(Protocol):
    """A place where labels are published."""

    def publish(self, node_labels: Mapping[str, str]) -> None:
        """Replace the labels that were published before; may block; raise GpuRuntimeError."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the service; *interval_s* None means that only changes are published."""

    oneshot: bool = False
    timestamp: bool = True
    interval_s: float | None = 60.0


class FeatureDiscovery:
    """The service; *load* returns the config in force, or raises ConfigError."""

    def __init__(
        self,
        load: Callable[[], Config],
        publishers: Sequence[Publisher],
        options: Options | None = None,
        *,
        watch: Watch = watcher,
        read_machine: Callable[[], labels.Machine] = machine.read,
        clock: Callable[[], float] = time.monotonic,
        back_off: BackOff | None = None,
    ) -> None:
        self.load = load
        self.config = load()
        self.publishers = publishers
        self.options = options or Options()
        self.watch = watch
        self.read_machine = read_machine
        self.clock = clock
        self.back_off = back_off or BackOff(_FIRST_S, _MOST_S, draw=random.random)
        self.turns = Turns()
        self.problem = ""
        self.config_problem = ""
        self._timestamp = int(time.time())
        self._published: dict[str, str] | None = None
        self._next = 0.0
        self._retry_at = 0.0
        self._status = ""

    async def serve(self) -> None:
        """Publish until `turns` ends, or once.

        Raises DriverError if the driver does not answer at start and the config says that this is
        an error; with `oneshot` also the error of a publisher.
        """
        async with self.watch(roots(self.config)) as observed:
            async for turn in self.turns.of(observed, self._timeout):
                if turn.is_reload:
                    self._load_again()
                await self._take(turn.update)
                if self.options.oneshot and self._published is not None:
                    return

    def _timeout(self) -> float | None:
        """Return the seconds until the labels are derived again, None if that needs a cause."""
        if self.problem:
            return max(self._retry_at - self.clock(), 0.0)
        interval = self.options.interval_s
        return None if interval is None else max(self._next - self.clock(), 0.0)

    async def _take(self, update: Update) -> None:
        """Publish the labels of *update* if they have changed, or could not be published."""
        status = update.status
        if status.state is DriverState.STARTING:
            return
        self._status = "" if status.state is DriverState.READY else status.reason
        if status.state is not DriverState.READY and self._published is None:
            if self.config.fail_on_init_error:
                raise DriverError(
                    f"the driver is {status.state.value}: {status.reason or 'no answer'}",
                    status.hint or "use --fail-on-init-error=false to wait for it",
                )
            if self.options.oneshot:
                return
        facts = await asyncio.to_thread(self.read_machine)
        current = labels.node_labels(
            update.model,
            facts,
            mig_strategy=self.config.mig_strategy,
            sharing=shared(self.config),
            timestamp=self._timestamp if self.options.timestamp else None,
        )
        if self.options.interval_s is not None:
            self._next = self.clock() + self.options.interval_s
        if current == self._published and not self.problem:
            return
        if self.problem and self.clock() < self._retry_at:
            return
        try:
            for publisher in self.publishers:
                await asyncio.to_thread(publisher.publish, current)
        except GpuRuntimeError as error:
            if self.options.oneshot:
                raise
            if self.problem != str(error):
                log.error("%s", error.lines())
            self.problem = str(error)
            requested_s = getattr(error, "retry_after_s", 0.0)
            self._retry_at = self.clock() + requested_s + self.back_off.delay(0.0)
            return
        self.problem = ""
        self.back_off.reset()
        self._published = current
        log.info("published %d labels", len(current))

    def _load_again(self) -> None:
        """Use the config as it is now; keep the one in force if the new one cannot be used."""
        try:
            self.config = self.load()
        except ConfigError as error:
            self.config_problem = str(error)
            log.error("the new config is not used: %s", error.lines())
            return
        self.config_problem = ""
        self._timestamp = int(time.time())
        log.info("the config was read again")

    def report(self) -> Report:
        """Return the state of the service for probes."""
        reasons = [text for text in (self._status, self.problem) if text]
        if self._published is None and not reasons:
            reasons = ["no labels are published yet"]
        details = {
            "labels": len(self._published or ()),
            "config_error": self.config_problem,
        }
        return Report(tuple(reasons), details)


def shared(config: Config) -> dict[str, labels.Sharing]:
    """Return how the resources of *config* are shared, by name without the domain."""
    if config.sharing is None:
        return {}
    strategy = _STRATEGIES[config.sharing.kind]
    return {
        resource.name.removeprefix(f"{DEFAULT_DOMAIN}/"): labels.Sharing(
            strategy, resource.replicas, renamed=resource.new_name != resource.name
        )
        for resource in config.sharing.resources
    }
