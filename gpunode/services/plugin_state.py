# SPDX-License-Identifier: Apache-2.0
"""What the device plugin offers at a moment, from the updates of the watcher and the config.

No input or output, and no clock: `device_plugin` feeds it and publishes the result.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpunode import allocation, devices, health, roster
from gpunode.allocation import Scores
from gpunode.config.effective import Config
from gpunode.delivery import Delivery
from gpunode.devices import Device, LayoutError, Offer
from gpunode.health import HealthState
from gpunode.kubelet.backend import Unit
from gpunode.model import DriverState, DriverStatus, NodeModel, Update
from gpunode.services.resource_backend import Published


class PluginState:
    """The node as the plugin knows it, and the resources that follow from it.

    *layout_error* is why the GPUs do not fit the config, None if they do; nothing is offered then.
    """

    def __init__(self, config: Config, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.config = config
        self.policy = health.policy(environment, config.health_quiet_time)
        self.health = HealthState()
        self.status = DriverStatus(DriverState.STARTING, 0.0)
        self.model: NodeModel | None = None
        self.offer = Offer()
        self.scores = Scores()
        self.layout_error: LayoutError | None = None
        self._last: NodeModel | None = None

    def advance(self, update: Update, now: float) -> None:
        """Take *update*, whose events are new, at the time *now*."""
        self.status = update.status
        lost = self.health.lost
        self.health = health.advance(self.health, update, now, self.policy)
        is_known = update.model is not None and update.status.state is DriverState.READY
        if is_known and (update.model is not self._last or lost != self.health.lost):
            assert update.model is not None
            self._last = update.model
            self.model = roster.with_lost(update.model, self.model, self.health.lost)
            self.scores = allocation.scores(self.model)
            self._derive()

    def set_config(self, config: Config) -> None:
        """Use *config* from now on; raise LayoutError if only the old one fits the GPUs."""
        old = self.config, self.policy, self.offer, self.layout_error
        self.config = config
        self.policy = health.policy(self.environment, config.health_quiet_time)
        self._derive()
        if self.layout_error is not None and old[3] is None:
            error = self.layout_error
            self.config, self.policy, self.offer, self.layout_error = old
            raise error

    def _derive(self) -> None:
        if self.model is None:
            return
        self.layout_error = None
        try:
            self.offer = devices.offer(self.model, self.config)
        except LayoutError as error:
            self.layout_error = error
            self.offer = Offer()

    def reason(self, device: Device, delivery: Delivery) -> str:
        """Return why a container cannot use *device*, "" if it can."""
        reason = self.health.reason(device)
        if not reason and delivery.uses_cdi and device.uuid not in delivery.names.devices:
            return "no CDI spec of the device plugin has it"
        return reason

    def unhealthy(self, delivery: Delivery) -> dict[str, str]:
        """Return the UUIDs of the devices that containers cannot use, with the reasons."""
        offered = {
            device.uuid: device for resource in self.offer.resources for device in resource.devices
        }
        reasons = {uuid: self.reason(device, delivery) for uuid, device in offered.items()}
        return {uuid: reason for uuid, reason in reasons.items() if reason}

    def published(self, delivery: Delivery) -> dict[str, Published]:
        """Return what is published of each resource, by its name."""
        unhealthy = self.unhealthy(delivery)
        result = {}
        for resource in self.offer.resources:
            units = tuple(
                Unit(
                    id=unit.id,
                    healthy=unit.device.uuid not in unhealthy,
                    numa_nodes=() if unit.device.numa_node is None else (unit.device.numa_node,),
                )
                for unit in resource.units
            )
            result[resource.name] = Published(resource, units, self.scores, delivery)
        return result
