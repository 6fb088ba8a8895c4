# SPDX-License-Identifier: Apache-2.0
"""The labels that describe a node's GPUs; pure. The names are those of GPU feature discovery."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpunode.model import MigAttributes, NodeGpu, NodeModel

PREFIX = "nvidia.com/"
NONE, SINGLE, MIXED = "none", "single", "mixed"
TIME_SLICING, MPS = "time-slicing", "mps"
MAX_VALUE = 63
# The first compute capability of each family, in ascending order.
_FAMILIES = (
    *((3, 0, "kepler"), (5, 0, "maxwell"), (6, 0, "pascal"), (7, 0, "volta"), (7, 5, "turing")),
    *((8, 0, "ampere"), (8, 9, "ada-lovelace"), (9, 0, "hopper"), (10, 0, "blackwell")),
    *((11, 0, "undefined"), (12, 0, "blackwell"), (13, 0, "rubin"), (14, 0, "undefined")),
)
# PCI classes of GPUs, without the programming interface.
_MODES = {0x0300: "graphics", 0x0302: "compute"}
# A value as the API server checks it.
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?\Z")
_DROPPED = re.compile(r"[^A-Za-z0-9_. \t-]")
_DRIVER_VERSION = re.compile(r"([0-9]+)\.([0-9]+)(?:\.([0-9]+))?\Z")
_CUDA_VERSION = re.compile(r"([0-9]+)\.([0-9]+)")


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the units of a resource are shared: *strategy* is `time-slicing` or `mps`.

    *renamed* says whether the resource has another name than that of unshared devices.
    """

    strategy: str
    replicas: int
    renamed: bool = False


@dataclass(frozen=True, slots=True)
class Vgpu:
    """The driver of the hypervisor, as the PCI configuration space of a virtual GPU reports it."""

    host_driver_version: str = ""
    host_driver_branch: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not come from the driver.

    *product* is the name of the machine. *pci_classes* are the 16-bit classes by PCI address.
    *vgpu* is None on a machine without virtual GPUs.
    """

    product: str = ""
    pci_classes: Mapping[str, int] = field(default_factory=dict)
    vgpu: Vgpu | None = None


def node_labels(
    model: NodeModel | None,
    machine: Machine,
    *,
    mig_strategy: str = NONE,
    sharing: Mapping[str, Sharing] | None = None,
    timestamp: int | None = None,
) -> dict[str, str]:
    """Return the labels of the node, with their prefix; every value is valid for Kubernetes.

    *model* is None if the driver does not answer: then there are labels of the machine only.
    *sharing* is by resource name, without the prefix: `gpu`, `mig-1g.5gb`. *timestamp*, in Unix
    seconds, is that of the config.
    """
    labels = dict(_machine_labels(machine))
    if timestamp is not None:
        labels["gfd.timestamp"] = str(timestamp)
    if model is not None:
        labels |= _driver_labels(model)
        if model.gpus:
            labels |= _gpu_labels(model, machine, mig_strategy, sharing or {})
    return {PREFIX + name: valid(value) for name, value in sorted(labels.items())}


def valid(text: str, suffix: str = "") -> str:
    """Return *text* as the value of a label, at most 63 characters with *suffix*, or "".

    Characters that a label cannot have are dropped; blanks become dashes.
    """
    joined = "-".join(_DROPPED.sub("", text).split())
    return (joined.strip("-_.")[: MAX_VALUE - len(suffix)] + suffix).strip("-_.")


def is_valid(text: str) -> bool:
    """Return whether *text* can be the value of a label."""
    return len(text) <= MAX_VALUE and _VALUE.match(text) is not None


def family(architecture: str) -> str:
    """Return the family of GPUs with the compute capability *architecture*, `8.0`."""
    capability = _capability(architecture)
    names = [name for *first, name in _FAMILIES if capability and tuple(first) <= capability]
    return names[-1] if names else "undefined"


def _machine_labels(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "gpu.machine", valid(machine.product) or "unknown"
    yield "vgpu.present", _boolean(machine.vgpu is not None)
    if machine.vgpu is not None:
        if machine.vgpu.host_driver_version:
            yield "vgpu.host-driver-version", machine.vgpu.host_driver_version
        if machine.vgpu.host_driver_branch:
            yield "vgpu.host-driver-branch", machine.vgpu.host_driver_branch


def _driver_labels(model: NodeModel) -> dict[str, str]:
    """Return the versions of driver and CUDA, under their present and their former names."""
    labels = {}
    driver = _DRIVER_VERSION.match(model.driver_version)
    if driver:
        major, minor, revision = driver.group(1), driver.group(2), driver.group(3) or ""
        for name, value in (("major", major), ("minor", minor), ("revision", revision)):
            labels[f"cuda.driver-version.{name}"] = value
            labels[f"cuda.driver.{name.replace('revision', 'rev')}"] = value
        labels["cuda.driver-version.full"] = model.driver_version
    cuda = _CUDA_VERSION.match(model.cuda_version)
    if cuda:
        for name, value in (("major", cuda.group(1)), ("minor", cuda.group(2))):
            labels[f"cuda.runtime-version.{name}"] = value
            labels[f"cuda.runtime.{name}"] = value
        labels["cuda.runtime-version.full"] = cuda.group(0)
    return labels


def _gpu_labels(
    model: NodeModel, machine: Machine, mig_strategy: str, sharing: Mapping[str, Sharing]
) -> dict[str, str]:
    gpus = model.gpus
    described = _most_frequent(gpus)
    first = described[0]
    capability = _capability(first.gpu.architecture)
    labels = {
        "mig.capable": _boolean(any(gpu.mig_capable for gpu in gpus)),
        "mps.capable": _boolean(_is_shared_by_mps(gpus, sharing)),
        "gpu.mode": _MODES.get(machine.pci_classes.get(first.gpu.bus_id, 0), "unknown"),
        **_resource_labels("gpu", first.gpu.name, len(described), sharing.get("gpu")),
    }
    if all(gpu.gpu.mig_enabled for gpu in described):
        # Whole GPUs are not offered.
        labels["gpu.replicas"] = "0"
    if first.memory_mib is not None:
        labels["gpu.memory"] = str(first.memory_mib)
    if capability:
        labels["gpu.family"] = family(first.gpu.architecture)
        labels["gpu.compute.major"], labels["gpu.compute.minor"] = map(str, capability)
    if len({gpu.gpu.name for gpu in gpus}) > 1:
        labels["gpu.products.mixed"] = "true"
    cliques = {(gpu.cluster_uuid, gpu.clique_id) for gpu in gpus}
    cluster, clique = cliques.pop()
    if not cliques and cluster and clique is not None:
        labels["gpu.clique"] = f"{cluster}.{clique}"
    if mig_strategy in (SINGLE, MIXED):
        labels["mig.strategy"] = mig_strategy
    if mig_strategy == SINGLE and any(gpu.gpu.mig_enabled for gpu in gpus):
        labels |= _single_labels(gpus, sharing)
    elif mig_strategy == MIXED:
        labels |= _mixed_labels(gpus, sharing)
    return labels


def _resource_labels(
    name: str, product: str, count: int, sharing: Sharing | None, suffix: str = ""
) -> dict[str, str]:
    """Return the labels that a resource of whole GPUs and one of MIG devices have in common."""
    if sharing is not None and sharing.replicas > 1 and not sharing.renamed:
        suffix += "-SHARED"
    return {
        f"{name}.count": str(count),
        f"{name}.product": valid(product, suffix),
        f"{name}.replicas": str(sharing.replicas if sharing else 1),
        f"{name}.sharing-strategy": sharing.strategy if sharing else NONE,
    }


def _single_labels(gpus: Sequence[NodeGpu], sharing: Mapping[str, Sharing]) -> dict[str, str]:
    """Return the labels of the strategy `single`: all devices of `gpu` have one MIG profile."""
    first = _most_frequent(gpus)[0]
    devices = [device.attributes for gpu in gpus for device in gpu.mig_devices]
    is_uniform = len({attributes.profile for attributes in devices}) == 1 and all(
        gpu.gpu.mig_enabled and gpu.mig_devices for gpu in gpus
    )
    if not is_uniform:
        return {
            "gpu.product": valid(first.gpu.name, "-MIG-INVALID"),
            **dict.fromkeys(("gpu.count", "gpu.replicas", "gpu.memory"), "0"),
            "gpu.sharing-strategy": "",
        }
    return _mig_labels("gpu", first.gpu.name, devices, sharing.get("gpu"))


def _mixed_labels(gpus: Sequence[NodeGpu], sharing: Mapping[str, Sharing]) -> dict[str, str]:
    """Return the labels of the strategy `mixed`: a resource for each profile."""
    labels: dict[str, str] = {}
    profiles = {device.attributes.profile for gpu in gpus for device in gpu.mig_devices}
    for profile in sorted(profiles):
        holders = [
            gpu
            for gpu in gpus
            if any(device.attributes.profile == profile for device in gpu.mig_devices)
        ]
        devices = [
            device.attributes
            for gpu in holders
            for device in gpu.mig_devices
            if device.attributes.profile == profile
        ]
        name = f"mig-{profile.replace('+', '.')}"
        product = _most_frequent(holders)[0].gpu.name
        labels |= _mig_labels(name, product, devices, sharing.get(name))
    return labels


def _mig_labels(
    name: str, product: str, devices: Sequence[MigAttributes], sharing: Sharing | None
) -> dict[str, str]:
    """Return the labels of the resource *name* that has the MIG devices *devices* of one size."""
    one = devices[0]
    suffix = f"-MIG-{one.profile.replace('+', '.')}"
    return {
        **_resource_labels(name, product, len(devices), sharing, suffix),
        f"{name}.memory": str(one.memory_mib),
        f"{name}.multiprocessors": str(one.multiprocessors),
        f"{name}.slices.gi": str(one.gpu_slices),
        f"{name}.slices.ci": str(one.compute_slices),
        f"{name}.engines.copy": str(one.copy_engines),
        f"{name}.engines.decoder": str(one.decoders),
        f"{name}.engines.encoder": str(one.encoders),
        f"{name}.engines.jpeg": str(one.jpeg_engines),
        f"{name}.engines.ofa": str(one.ofa_engines),
    }


def _most_frequent(gpus: Iterable[NodeGpu]) -> list[NodeGpu]:
    """Return the GPUs of the most frequent model, of equally frequent ones the first by name."""
    gpus = list(gpus)
    counts = Counter(gpu.gpu.name for gpu in gpus)
    name = min(counts, key=lambda name: (-counts[name], name))
    return [gpu for gpu in gpus if gpu.gpu.name == name]


def _is_shared_by_mps(gpus: Sequence[NodeGpu], sharing: Mapping[str, Sharing]) -> bool:
    """Return whether the daemons of MPS are to run here; MPS excludes MIG."""
    return any(one.strategy == MPS for one in sharing.values()) and not any(
        gpu.gpu.mig_enabled for gpu in gpus
    )


def _capability(architecture: str) -> tuple[int, int] | None:
    major, _, minor = architecture.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _boolean(value: object) -> str:
    return "true" if value else "false"
