# SPDX-License-Identifier: Apache-2.0
"""One resource as the kubelet's server sees it: its units now, their allocation."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gpunode import allocation, delivery
from gpunode.allocation import Scores
from gpunode.delivery import Delivery
from gpunode.devices import Resource
from gpunode.kubelet.backend import ContainerResponse, Unit


@dataclass(frozen=True, slots=True)
class Published:
    """What a backend answers from: always of one state of the node."""

    resource: Resource
    units: tuple[Unit, ...]
    scores: Scores
    delivery: Delivery


class ResourceBackend:
    """The Backend of one resource; `publish` replaces all that it answers from."""

    def __init__(self, published: Published) -> None:
        self._published = published
        self._changed = asyncio.Event()
        self._is_ended = False

    @property
    def resource_name(self) -> str:
        """The name of the resource."""
        return self._published.resource.name

    @property
    def has_preferred_allocation(self) -> bool:
        """Whether the kubelet asks for preferred allocations: always."""
        return True

    @property
    def published(self) -> Published:
        """What the backend answers from now."""
        return self._published

    def publish(self, published: Published) -> None:
        """Answer from *published* from now on; streams get the units if they have changed."""
        is_changed = published.units != self._published.units
        self._published = published
        if is_changed:
            self._wake()

    def end(self) -> None:
        """End all streams."""
        self._is_ended = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def unit_lists(self) -> AsyncIterator[Sequence[Unit]]:
        """Yield all units now, and whole again after each change."""
        while not self._is_ended:
            changed = self._changed
            yield self._published.units
            await changed.wait()

    def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """Return the preferred *size* of the ids *available*."""
        now = self._published
        policy = now.delivery.config.shared_devices_allocation_policy
        return allocation.preferred(
            now.resource, now.scores, policy, available, must_include, size
        )

    def allocate(self, ids: Sequence[str]) -> ContainerResponse:
        """Return what a container with the units *ids* gets; raise AllocationError."""
        now = self._published
        return delivery.response(now.resource, ids, now.delivery, str(uuid.uuid4()))
