# SPDX-License-Identifier: Apache-2.0
"""What a container gets for its units, by each device list strategy; pure.

Errors are written for the user of the pod: the kubelet puts them into the pod's status.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpunode.config import settings
from gpunode.config.effective import Config
from gpunode.config.sharing import SharingKind
from gpunode.devices import Device, Resource
from gpunode.kubelet.backend import AllocationError, ContainerResponse, DeviceSpec, Mount
from gpunode.plugin_spec import GPU, IMEX, Names
from gpuruntime.model import Inventory

CDI_STRATEGIES = (settings.CDI_ANNOTATIONS, settings.CDI_CRI)
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
IMEX_CHANNELS = "NVIDIA_IMEX_CHANNELS"
# A bind mount of /dev/null below this directory names a device to our runtime.
MOUNT_DIRECTORY = "/var/run/nvidia-container-devices"
_PLACEHOLDER = "/dev/null"
_ANNOTATION = "nvidia-device-plugin_"
# Of the nodes that no GPU owns, those that a program with a GPU needs.
_CONTROL_NODES = (
    *("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"),
)
_MPS_DIRECTORY = "/mps"
_MAX_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Delivery:
    """How containers get devices.

    *strategies* are those in force, never `auto`. *names* are the CDI devices of the specs that
    are written, *inventory* has the device nodes; both may be of an earlier state of the driver.
    """

    config: Config
    strategies: Collection[str]
    names: Names
    inventory: Inventory | None = None

    @property
    def uses_cdi(self) -> bool:
        """Whether CDI names are returned."""
        return any(strategy in CDI_STRATEGIES for strategy in self.strategies)


def response(
    resource: Resource, ids: Sequence[str], delivery: Delivery, unique: str
) -> ContainerResponse:
    """Return what a container with the units *ids* of *resource* gets.

    *unique* is a UUID for the key of the annotation. Raises AllocationError if a unit does not
    exist, if more than one shared unit is requested though that is refused, or if a device cannot
    be delivered.
    """
    devices = _devices(resource, ids, delivery.config)
    config = delivery.config
    channels = _channels(delivery)
    envs: dict[str, str] = {}
    mounts: list[Mount] = []
    specs: list[DeviceSpec] = []
    annotations: dict[str, str] = {}
    cdi_devices: tuple[str, ...] = ()
    if delivery.uses_cdi:
        names = _cdi_names(resource, devices, channels, delivery)
        if settings.CDI_ANNOTATIONS in delivery.strategies:
            key = f"{config.cdi_annotation_prefix}{_ANNOTATION}{unique}"
            annotations[key] = ",".join(names)
        if settings.CDI_CRI in delivery.strategies:
            cdi_devices = names
    if resource.sharing is SharingKind.MPS:
        _add_mps(resource, devices, config, envs, mounts)
    if any(strategy not in CDI_STRATEGIES for strategy in delivery.strategies):
        visible = [_visible_name(device, config) for device in devices]
        if settings.ENVVAR in delivery.strategies:
            envs[VISIBLE_DEVICES] = ",".join(visible)
            if channels:
                envs[IMEX_CHANNELS] = ",".join(channels)
        if settings.VOLUME_MOUNTS in delivery.strategies:
            envs[VISIBLE_DEVICES] = MOUNT_DIRECTORY
            paths = [*visible, *(f"{IMEX}/{channel}" for channel in channels)]
            mounts += [Mount(f"{MOUNT_DIRECTORY}/{path}", _PLACEHOLDER) for path in paths]
        if config.pass_device_specs:
            specs = _device_specs(resource, devices, delivery)
        for feature, is_on in _features(config).items():
            if is_on:
                envs[f"NVIDIA_{feature.upper()}"] = "enabled"
    return ContainerResponse(envs, tuple(mounts), tuple(specs), annotations, cdi_devices)


def _features(config: Config) -> Mapping[str, bool]:
    return {
        "gdrcopy": config.gdrcopy_enabled,
        "gds": config.gds_enabled,
        "mofed": config.mofed_enabled,
    }


def _devices(resource: Resource, ids: Sequence[str], config: Config) -> list[Device]:
    """Return the devices of the units *ids*, each once; raise AllocationError."""
    by_id = {unit.id: unit for unit in resource.units}
    for name in ids:
        if name not in by_id:
            shown = name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..."
            raise _refused(
                resource,
                f"invalid request: unknown device: {shown}: the devices of the node have "
                "changed; create the pod again",
            )
    sharing = config.sharing
    is_shared = any(by_id[name].replica is not None for name in ids)
    if sharing and sharing.fail_requests_greater_than_one and is_shared and len(ids) > 1:
        raise _refused(
            resource,
            "invalid request: maximum request size for shared resources is 1; "
            f"found {len(ids)}: several shares do not make a larger share; request 1, or set "
            f'"sharing.{sharing.kind.value}.failRequestsGreaterThanOne: false" in the config of '
            "the device plugin",
        )
    return list({by_id[name].device.uuid: by_id[name].device for name in ids}.values())


def _refused(resource: Resource, problem: str) -> AllocationError:
    return AllocationError(f'invalid allocation request for "{resource.name}": {problem}')


def _visible_name(device: Device, config: Config) -> str:
    return device.index if config.device_id_strategy == settings.INDEX else device.uuid


def _channels(delivery: Delivery) -> list[str]:
    """Return the IMEX channels of a container; raise AllocationError for a required one."""
    channels = [str(channel) for channel in delivery.config.imex_channel_ids]
    missing = [channel for channel in channels if channel not in delivery.names.channels]
    if missing and delivery.config.imex_required:
        raise AllocationError(
            f"IMEX channel {missing[0]} does not exist on the node, and the device plugin "
            "requires it; start nvidia-imex on the node"
        )
    return [channel for channel in channels if channel not in missing]


def _cdi_names(
    resource: Resource, devices: Sequence[Device], channels: Sequence[str], delivery: Delivery
) -> tuple[str, ...]:
    """Return qualified names that the written specs have; raise AllocationError."""
    names = []
    for device in devices:
        name = delivery.names.devices.get(device.uuid)
        if name is None:
            raise _refused(
                resource,
                f"device {device.uuid} has no CDI name: its device nodes are missing, or the "
                "spec cannot be written; the log of the device plugin has the reason",
            )
        names.append(delivery.names.qualified(GPU, name))
    names += [delivery.names.qualified(IMEX, channel) for channel in channels]
    names += [
        delivery.names.qualified(feature, "all")
        for feature, is_on in _features(delivery.config).items()
        if is_on and feature in delivery.names.features
    ]
    return tuple(names)


def _add_mps(
    resource: Resource,
    devices: Sequence[Device],
    config: Config,
    envs: dict[str, str],
    mounts: list[Mount],
) -> None:
    """Add the pipes of the MPS control daemon of *resource*.

    The daemon serves all GPUs of the resource, so the container's own are named to CUDA too.
    """
    pipe = f"{_MPS_DIRECTORY}/{resource.name}/pipe"
    envs["CUDA_MPS_PIPE_DIRECTORY"] = pipe
    envs["CUDA_VISIBLE_DEVICES"] = ",".join(device.uuid for device in devices)
    host_pipe = posixpath.join(config.mps_root, resource.name, "pipe")
    mounts.append(Mount(pipe, host_pipe, read_only=False))
    host_memory = posixpath.join(config.mps_root, "shm")
    mounts.append(Mount("/dev/shm", host_memory, read_only=False))  # noqa: S108 (a mount point)


def _device_specs(
    resource: Resource, devices: Sequence[Device], delivery: Delivery
) -> list[DeviceSpec]:
    """Return the control nodes and the nodes of *devices*; raise AllocationError."""
    if delivery.inventory is None:
        raise _refused(resource, "the device nodes are not known yet; create the pod again")
    by_uuid: dict[str, list[str]] = {}
    for gpu in delivery.inventory.gpus:
        by_uuid[gpu.gpu.uuid] = [gpu.node.container_path]
        for mig, gpu_instance, compute_instance in gpu.mig:
            nodes = (gpu.node, gpu_instance, compute_instance)
            by_uuid[mig.uuid] = [node.container_path for node in nodes]
    existing = {node.container_path for node in delivery.inventory.control_nodes}
    paths = [path for path in _CONTROL_NODES if path in existing]
    for device in devices:
        if device.uuid not in by_uuid:
            raise _refused(resource, f"the device nodes of {device.uuid} are missing on the node")
        paths += by_uuid[device.uuid]
    root = delivery.config.nvidia_dev_root.rstrip("/")
    return [DeviceSpec(path, f"{root}{path}") for path in dict.fromkeys(paths)]
