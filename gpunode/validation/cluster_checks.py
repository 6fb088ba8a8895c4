# SPDX-License-Identifier: Apache-2.0
"""Checks of the units and the DRA devices that the cluster has of this node; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpunode.engine import Engine
from gpunode.pod_devices import DOMAIN, DRA_DRIVER
from gpuruntime.cli.checks.finding import Note, fail, ok

_KINDS = (f"{DOMAIN}gpu", f"{DOMAIN}mig-")


@dataclass(frozen=True, slots=True)
class NodeUnits:
    """Capacity and allocatable units of a node by resource, as the API server has them."""

    capacity: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    """What the checks ask the API server about this node; both raise GpuRuntimeError."""

    def units(self) -> NodeUnits:
        """Return the units of the node."""
        ...

    def dra_devices(self) -> Mapping[str, int]:
        """Return the number of devices in the node's ResourceSlices, by DRA driver."""
        ...


def gpu_units(amounts: Mapping[str, str]) -> dict[str, int]:
    """Return the resources of *amounts* that are GPUs or MIG devices, with their numbers."""
    return {
        name: int(text)
        for name, text in amounts.items()
        if name.startswith(_KINDS) and text.isascii() and text.isdecimal()
    }


def plugin(cluster: Cluster) -> Iterator[Note]:
    """Check whether the node has units of GPUs that pods can get."""
    units = cluster.units()
    allocatable = {name: n for name, n in gpu_units(units.allocatable).items() if n}
    capacity = sum(gpu_units(units.capacity).values())
    if allocatable:
        amounts = ", ".join(f"{name}: {number}" for name, number in sorted(allocatable.items()))
        yield ok(f"the node offers {amounts}")
    elif capacity:
        yield fail(
            f"none of the node's {capacity} GPU unit(s) is allocatable: they are unhealthy, or "
            "the device plugin has ended",
            "read the log of the device plugin",
        )
    else:
        yield fail(
            f"the node offers no {_KINDS[0]} and no {_KINDS[1]}*",
            "start the device plugin on this node, and read its log",
        )


def dra(cluster: Cluster, engine: Engine | None) -> Iterator[Note]:
    """Check whether two programs offer the GPUs, and whether claims reach containers.

    *engine* is the engine of the node, None if it does not answer.
    """
    devices = cluster.dra_devices().get(DRA_DRIVER, 0)
    units = sum(gpu_units(cluster.units().allocatable).values())
    if devices and units:
        yield fail(
            f"the DRA driver offers {devices} device(s) and the device plugin {units} unit(s) of "
            "the same GPUs: two pods can get one GPU",
            "keep one of them away from this node, by its node selector",
        )
    if devices and engine is not None and not engine.reads_cri_names:
        yield fail(
            f"{engine.title} ignores the CDI names of claims: pods with claims start without "
            "their GPUs",
            "switch CDI on in the engine, or use containerd 1.7 or CRI-O 1.28 at least",
        )
    if devices:
        yield ok(f"the DRA driver offers {devices} device(s)")
    else:
        yield ok("no DRA driver offers the GPUs of this node")
