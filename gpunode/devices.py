# SPDX-License-Identifier: Apache-2.0
"""The resources of a node and their units, from the model and the configuration; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpunode.config import settings
from gpunode.config.effective import Config
from gpunode.config.sharing import SharedResource, SharingKind
from gpunode.model import NodeGpu, NodeMigDevice, NodeModel
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.plan.devices import DISPLAY_ONLY

FULL_GPUS = "nvidia.com/gpu"
# Between the UUID of a device and the number of a unit of it.
REPLICA = "::"
MAX_ID = 63
# The kubelet reads at most 4 MiB in one message, and a unit takes up to 80 bytes.
MAX_UNITS = 40_000
# MPS clients of one GPU at most, from this compute capability on, and before.
_VOLTA = (7, 0)
_MPS_CLIENTS, _MPS_CLIENTS_BEFORE_VOLTA = 48, 16


class LayoutError(GpuRuntimeError):
    """The GPUs or MIG devices of the node do not fit the configuration."""

    phase = "devices"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that is used whole, or a MIG device.

    *index* is `0`, or `0:1` for a MIG device. *gpu_uuid* is the UUID of the (parent) GPU.
    """

    uuid: str
    index: str
    gpu_uuid: str
    minor: int
    gpu_instance: int | None = None
    compute_instance: int | None = None
    numa_node: int | None = None
    profile: str = ""

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG device."""
        return self.gpu_instance is not None

    @property
    def position(self) -> tuple[int, ...]:
        """The index as numbers, for sorting."""
        return tuple(map(int, self.index.split(":")))


@dataclass(frozen=True, slots=True)
class DeviceUnit:
    """What the kubelet allocates: a device, or the share number *replica* of it."""

    id: str
    device: Device
    replica: int | None = None


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource with its units in order; *sharing* and *replicas* are those of shared units.

    *replicas* is the largest number of units of one device, 1 if none is shared.
    """

    name: str
    units: tuple[DeviceUnit, ...]
    sharing: SharingKind | None = None
    replicas: int = 1

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the units, each once."""
        return tuple({unit.device.uuid: unit.device for unit in self.units}.values())


@dataclass(frozen=True, slots=True)
class Offer:
    """All resources of a node, by name, and sentences about what is not offered."""

    resources: tuple[Resource, ...] = ()
    problems: tuple[str, ...] = ()


def offer(model: NodeModel, config: Config) -> Offer:
    """Return the resources of *model* by *config*.

    Raises LayoutError if the GPUs and MIG devices do not fit the MIG strategy or the sharing.
    """
    gpus = sorted(
        (gpu for gpu in model.gpus if gpu.gpu.name not in DISPLAY_ONLY),
        key=lambda gpu: gpu.gpu.index,
    )
    problems: list[str] = []
    by_name = _by_resource(gpus, config.mig_strategy, problems)
    shared = _Shares(config, problems).divide(by_name)
    capabilities = {gpu.gpu.uuid: gpu.gpu.architecture for gpu in gpus}
    resources = []
    for name in sorted(shared):
        resource = _resource(name, shared[name], config, problems)
        if len(resource.units) > MAX_UNITS:
            raise LayoutError(
                f'"{name}" has {len(resource.units)} units, and the kubelet reads at most '
                f"{MAX_UNITS}",
                'use fewer "replicas"',
            )
        if resource.sharing is SharingKind.MPS:
            _check_mps(resource, capabilities)
        if resource.units:
            resources.append(resource)
    return Offer(tuple(resources), tuple(dict.fromkeys(problems)))


def resource_of_profile(profile: str) -> str:
    """Return the name of the resource of MIG devices of *profile*, `nvidia.com/mig-1g.5gb.me`."""
    return f"nvidia.com/mig-{profile.replace('+', '.')}"


def device_of(gpu: NodeGpu, mig: NodeMigDevice | None = None) -> Device:
    """Return the device of *gpu*, or of its MIG device *mig*."""
    index, numa = str(gpu.gpu.index), gpu.numa_node
    if numa is not None and numa < 0:
        numa = None
    if mig is None:
        return Device(gpu.gpu.uuid, index, gpu.gpu.uuid, gpu.gpu.minor, numa_node=numa)
    return Device(
        uuid=mig.device.uuid,
        index=f"{index}:{mig.device.index}",
        gpu_uuid=gpu.gpu.uuid,
        minor=gpu.gpu.minor,
        gpu_instance=mig.device.gpu_instance,
        compute_instance=mig.device.compute_instance,
        numa_node=numa,
        profile=mig.attributes.profile,
    )


def _by_resource(
    gpus: Sequence[NodeGpu], strategy: str, problems: list[str]
) -> dict[str, list[Device]]:
    """Return the devices of each resource by the MIG *strategy*; raise LayoutError."""
    if strategy == settings.NONE:
        return {FULL_GPUS: [device_of(gpu) for gpu in gpus]}
    divided = [gpu for gpu in gpus if gpu.gpu.mig_enabled]
    whole = [device_of(gpu) for gpu in gpus if not gpu.gpu.mig_enabled]
    if strategy == settings.SINGLE:
        if not divided:
            return {FULL_GPUS: whole}
        _check_single(divided, whole)
        return {FULL_GPUS: [device_of(gpu, mig) for gpu in divided for mig in gpu.mig_devices]}
    resources = {FULL_GPUS: whole}
    for gpu in divided:
        if not gpu.mig_devices:
            problems.append(f"GPU {gpu.gpu.index} is in MIG mode and has no MIG device")
        for mig in gpu.mig_devices:
            attributes = mig.attributes
            if attributes.compute_slices != attributes.gpu_slices:
                problems.append(
                    f"MIG device {gpu.gpu.index}:{mig.device.index} is not offered: its profile "
                    f"{attributes.profile} is a part of a GPU instance"
                )
                continue
            name = resource_of_profile(attributes.profile)
            resources.setdefault(name, []).append(device_of(gpu, mig))
    return resources


def _check_single(divided: Sequence[NodeGpu], whole: Sequence[Device]) -> None:
    """Raise LayoutError unless all GPUs have MIG devices of one profile."""
    if whole:
        indices = ", ".join(device.index for device in whole)
        raise LayoutError(
            "all devices on the node must be configured with the same migEnabled value: "
            f"not in MIG mode: {indices}",
            'enable MIG mode on all GPUs or on none, or use "--mig-strategy=mixed"',
        )
    for gpu in divided:
        if not gpu.mig_devices:
            raise LayoutError(
                f"device {gpu.gpu.index} has no MIG devices configured",
                'create MIG devices with "nvidia-smi mig", or use "--mig-strategy=mixed"',
            )
    profiles = sorted({mig.attributes.profile for gpu in divided for mig in gpu.mig_devices})
    if len(profiles) > 1:
        raise LayoutError(
            f"more than one MIG device type present on node: {', '.join(profiles)}",
            'create MIG devices of one profile, or use "--mig-strategy=mixed"',
        )


class _Shares:
    """The division of devices among shared and other resources."""

    def __init__(self, config: Config, problems: list[str]) -> None:
        self.entries = config.sharing.resources if config.sharing else ()
        self.problems = problems

    def divide(
        self, by_name: Mapping[str, Iterable[Device]]
    ) -> dict[str, list[tuple[Device, int]]]:
        """Return resource → (device, number of its units); 1 is a device that is not shared."""
        result: dict[str, list[tuple[Device, int]]] = {}
        for name, devices in by_name.items():
            remaining = sorted(devices, key=lambda device: device.position)
            for entry in self.entries:
                if entry.name != name:
                    continue
                selected = self._selected(entry, remaining)
                result.setdefault(entry.new_name, []).extend(
                    (device, entry.replicas) for device in selected
                )
                remaining = [device for device in remaining if device not in selected]
            result.setdefault(name, []).extend((device, 1) for device in remaining)
        self.problems += [
            f'"{entry.name}" of the sharing section is not a resource of this node'
            for entry in self.entries
            if entry.name not in by_name
        ]
        return result

    def _selected(self, entry: SharedResource, devices: list[Device]) -> list[Device]:
        if entry.devices is None:
            return devices[: entry.count]
        names = set(entry.devices)
        selected = [device for device in devices if {device.index, device.uuid} & names]
        for name in entry.devices:
            if not any(name in (device.index, device.uuid) for device in selected):
                self.problems.append(f'no device "{name}" of "{entry.name}" to share')
        return selected


def _resource(
    name: str, devices: Sequence[tuple[Device, int]], config: Config, problems: list[str]
) -> Resource:
    """Return the resource *name* with the units of *devices* (device, number of units)."""
    units: list[DeviceUnit] = []
    for device, replicas in sorted(devices, key=lambda item: item[0].position):
        last_id = f"{device.uuid}{REPLICA}{replicas - 1}" if replicas > 1 else device.uuid
        if not device.uuid or len(last_id) > MAX_ID:
            reason = f'the id "{last_id}" is too long' if device.uuid else "it has no UUID"
            problems.append(f"device {device.index} is not offered: {reason}")
        elif replicas == 1:
            units.append(DeviceUnit(device.uuid, device))
        else:
            units += [DeviceUnit(f"{device.uuid}{REPLICA}{i}", device, i) for i in range(replicas)]
    resource = Resource(name, tuple(units))
    most = max((replicas for _, replicas in devices), default=1)
    if most == 1 or config.sharing is None:
        return resource
    return replace(resource, sharing=config.sharing.kind, replicas=most)


def _check_mps(resource: Resource, capabilities: Mapping[str, str]) -> None:
    """Raise LayoutError if the devices of *resource* cannot be shared by MPS as configured."""
    counts: dict[str, int] = {}
    for unit in resource.units:
        if unit.replica is None:
            continue
        if unit.device.is_mig:
            raise LayoutError(
                "sharing using MPS is not supported for MIG devices: "
                f'"{resource.name}" has the MIG device {unit.device.index}',
                'use "sharing.timeSlicing" for MIG devices',
            )
        counts[unit.device.uuid] = counts.get(unit.device.uuid, 0) + 1
    for device in resource.devices:
        limit = _max_clients(capabilities.get(device.gpu_uuid, ""))
        if counts.get(device.uuid, 0) > limit:
            raise LayoutError(
                f'"sharing.mps" has {counts[device.uuid]} replicas of "{resource.name}", and MPS '
                f"has at most {limit} clients of GPU {device.index}",
                f'use at most {limit} "replicas"',
            )


def _max_clients(capability: str) -> int:
    """Return how many MPS clients a GPU of compute *capability*, such as `7.0`, has at most."""
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        # Unknown: no GPU that is supported today has the lower limit.
        return _MPS_CLIENTS
    return _MPS_CLIENTS if (int(major), int(minor)) >= _VOLTA else _MPS_CLIENTS_BEFORE_VOLTA
