# SPDX-License-Identifier: Apache-2.0
"""A Backend whose units a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from gpunode.kubelet.backend import AllocationError, ContainerResponse, DeviceSpec, Unit

NAME = "example.com/gpu"


class SetBackend:
    """A resource with the units that `set` sets: id → whether it is healthy."""

    def __init__(self, units: Mapping[str, bool], resource_name: str = NAME) -> None:
        self.resource_name = resource_name
        self.has_preferred_allocation = True
        self.responses: dict[str, ContainerResponse] = {}
        self.open_iterators = 0
        self._changed = asyncio.Condition()
        self._is_ended = False
        self.units = [Unit(name, healthy=healthy) for name, healthy in units.items()]

    async def set(self, units: Sequence[Unit]) -> None:
        """Change the units."""
        async with self._changed:
            self.units = list(units)
            self._changed.notify_all()

    async def end(self) -> None:
        """End every iterator."""
        async with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    async def unit_lists(self) -> AsyncIterator[Sequence[Unit]]:
        """Yield the units now and after each `set`, changed or not."""
        self.open_iterators += 1
        try:
            while not self._is_ended:
                yield self.units
                async with self._changed:
                    await self._changed.wait()
        finally:
            self.open_iterators -= 1

    def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """Return the first *size*, those of *must_include* before the others."""
        others = sorted(set(available) - set(must_include))
        return [*must_include, *others][:size]

    def allocate(self, ids: Sequence[str]) -> ContainerResponse:
        """Return a device node for each unit."""
        unknown = sorted(set(ids) - {unit.id for unit in self.units})
        if unknown:
            raise AllocationError(f'{self.resource_name} has no unit "{unknown[0]}"')
        return self.responses.get(
            ids[0],
            ContainerResponse(
                envs={"UNITS": ",".join(ids)},
                devices=tuple(DeviceSpec(f"/dev/{name}", "/dev/null") for name in ids),
            ),
        )
