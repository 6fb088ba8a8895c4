# SPDX-License-Identifier: Apache-2.0
"""Checks of the units and the DRA devices that the cluster has of this node; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpunode.engine import Engine
from gpunode.pod_devices import DOMAIN, DRA_DRIVER
from gpuruntime.cli.checks.finding import Note, fail, ok

# Names of runtimes for GPUs.
_HANDLERS = ("gpuruntime", "nvidia")
_KINDS = (f"{DOMAIN}gpu", f"{DOMAIN}mig-")


@dataclass(frozen=True, slots=True)
class NodeUnits:
    """Capacity and allocatable units of a node by resource, as the API server has them."""

    capacity: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    """What the checks ask the API server about this node; all raise GpuRuntimeError."""

    def units(self) -> NodeUnits:
        """Return the units of the node."""
        ...

    def dra_devices(self) -> Mapping[str, int]:
        """Return the number of devices in the node's ResourceSlices, by DRA driver."""
        ...

    def runtime_classes(self) -> Mapping[str, str]:
        """Return the handlers of the cluster's RuntimeClasses, by name."""
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


def runtime_class(
    cluster: Cluster, engine: str, runtimes: Collection[str], default: str
) -> Iterator[Note]:
    """Check whether pods can name a runtime for GPUs.

    *runtimes* are the names of those in the config of *engine*, and *default* is the name of its
    default runtime.
    """
    if not runtimes:
        yield fail(
            f"no runtime for GPUs is in the config of {engine or 'an engine'}",
            "run gpu-node install on this node",
        )
        return
    classes = cluster.runtime_classes()
    usable = sorted(name for name, handler in classes.items() if handler in runtimes)
    ours = min(runtimes)
    gone = {name: handler for name, handler in classes.items() if handler.startswith(_HANDLERS)}
    if usable:
        yield ok(f'pods get the runtime "{classes[usable[0]]}" by "runtimeClassName: {usable[0]}"')
    elif default in runtimes:
        yield ok(f'the default runtime of {engine} is "{default}"; no RuntimeClass is needed')
    elif gone:
        name, handler = min(gone.items())
        yield fail(
            f'the handler of the RuntimeClass "{name}" is "{handler}", and the runtime of '
            f'{engine} is "{ours}": pods of that class do not start on this node',
            f"run gpu-node install --runtime-name {handler} on this node",
        )
    else:
        yield fail(
            f'no RuntimeClass has the handler "{ours}": pods cannot name the runtime',
            "run kubectl apply -f deploy/base/common/runtime-class.yaml",
        )
