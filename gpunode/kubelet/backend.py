# SPDX-License-Identifier: Apache-2.0
"""What a device plugin's server serves: the values of the protocol, without gRPC.

The server of `plugin_server` calls a Backend; services implement it. Field names are those of the
protocol, package v1beta1 of the kubelet's device plugin interface.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class AllocationError(Exception):
    """An allocation is refused; the text reaches the user in the status of the pod."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A device of the resource as the kubelet knows it. *numa_nodes* is empty if unknown."""

    id: str
    healthy: bool
    numa_nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount of the container."""

    container_path: str
    host_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device node of the container; *permissions* are some of `r`, `w`, `m`."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class ContainerResponse:
    """What one container gets."""

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceSpec, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


class Backend(Protocol):
    """One resource: its units and their allocation.

    The methods are called on the event loop and return at once; they never wait for the driver.
    """

    @property
    def resource_name(self) -> str:
        """The name of the resource, `nvidia.com/gpu`."""
        ...

    @property
    def has_preferred_allocation(self) -> bool:
        """Whether the kubelet asks for preferred allocations."""
        ...

    def unit_lists(self) -> AsyncIterator[Sequence[Unit]]:
        """Yield all units now and, whole again, after each change; end when the resource ends."""
        ...

    def preferred(
        self, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        """Return the preferred *size* of the ids *available*; empty if there is none."""
        ...

    def allocate(self, ids: Sequence[str]) -> ContainerResponse:
        """Return what a container with the units *ids* gets; raise AllocationError."""
        ...
