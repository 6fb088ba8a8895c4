# SPDX-License-Identifier: Apache-2.0
"""The CDI specs of the device plugin: one file for each class of devices.

The specs are made from the inventory that this process sees. In a container, the driver and the
device nodes may be below other directories than on the host: host paths are replaced.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cdi import generate, store
from cdi.errors import CdiError
from cdi.wire import Edits, Spec
from gpunode.config import settings
from gpunode.config.effective import NO_IPC, Config
from gpuruntime import model
from gpuruntime.cli import features
from gpuruntime.errors import SpecError
from gpuruntime.model import Inventory
from gpuruntime.plan import driver_files, gpu_edits
from gpuruntime.plan.devices import ALL, DISPLAY_ONLY, GpuDevice
from gpuruntime.trusted_files import may_trust

VENDOR = "k8s.device-plugin.nvidia.com"
GPU = "gpu"
IMEX = "imex"
_FEATURES = (model.GDRCOPY, model.GDS, model.MOFED)
_CLASSES = (GPU, *map(features.class_of, (*_FEATURES, model.IMEX)))


@dataclass(frozen=True, slots=True)
class Roots:
    """Directories of the driver and of the parent of `dev`: as seen here, and on the host."""

    driver: str = "/"
    host_driver: str = "/"
    dev: str = "/"
    host_dev: str = "/"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the devices in the specs: UUID → name, IMEX channels, features."""

    devices: Mapping[str, str] = field(default_factory=dict)
    channels: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    def qualified(self, class_: str, name: str) -> str:
        """Return the qualified name of the device *name* of GPU, IMEX or a feature."""
        return f"{VENDOR}/{features.class_of(class_)}={name}"


@dataclass(frozen=True, slots=True)
class Specs:
    """The specs by class, and the names in them."""

    by_class: Mapping[str, Spec] = field(default_factory=dict)
    names: Names = field(default_factory=Names)


def names_of(inventory: Inventory, config: Config) -> Names:
    """Return the names that devices of *inventory* have with the id strategy of *config*."""
    devices = {
        device.uuid: name
        for device in _devices(inventory)
        if device.uuid and (name := _name(device, config))
    }
    channels = frozenset(
        node.container_path.rpartition("channel")[2] for node in inventory.features[model.IMEX]
    )
    present = frozenset(name for name in _FEATURES if inventory.features[name])
    return Names(devices, channels, present)


def specs(inventory: Inventory, config: Config, roots: Roots, hook_path: str) -> Specs:
    """Return the specs of *inventory*; a class without devices has none.

    *hook_path* is the path of the hook program on the host. Raises SpecError if the driver's files
    cannot be described.
    """
    names = names_of(inventory, config)
    style = gpu_edits.Style(
        hook_path,
        disabled=config.cdi_disable_hooks,
        groups=False,
    )
    by_class: dict[str, Spec] = {}
    try:
        if names.devices:
            by_class[GPU] = _gpu_spec(inventory, config, style, roots)
        for feature in (*_FEATURES, model.IMEX):
            if not inventory.features[feature]:
                continue
            devices = features.feature_devices(feature, (ALL,), inventory, style)
            class_ = features.class_of(feature)
            by_class[class_] = _spec(class_, devices, features.feature_edits(), roots)
    except CdiError as error:
        raise SpecError(
            f"the CDI spec of the device plugin is invalid: {error}",
            'check the paths of the driver with "gpuruntime driver list"',
        ) from error
    return Specs(by_class, names)


def path_of(class_: str, directory: str) -> str:
    """Return the path of the spec of *class_* in *directory*."""
    return os.path.join(directory, f"{generate.spec_name(f'{VENDOR}/{class_}')}.json")


def write(specs_: Specs, directory: str) -> list[str]:
    """Write *specs_* to *directory* and remove those of other classes; return changed paths.

    Each file is replaced at once, and is not touched if it has this content already. Raises
    SpecError if a file cannot be written.
    """
    changed = []
    for class_ in _CLASSES:
        path = path_of(class_, directory)
        spec = specs_.by_class.get(class_)
        try:
            if spec is None:
                name = os.path.basename(path)
                is_changed = store.remove(name, (directory,), may_trust=may_trust)
            else:
                text = generate.encode_canonical(spec, "json")
                is_changed = store.save(path, text, may_trust=may_trust)
        except (CdiError, OSError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise SpecError(
                f'cannot write "{path}": {problem}',
                "mount a directory that only root can write to, or name it: --cdi-spec-dir",
            ) from error
        if is_changed:
            changed.append(path)
    return changed


def _devices(inventory: Inventory) -> list[GpuDevice]:
    """Return every GPU, also those in MIG mode, and every MIG device with its nodes."""
    devices = []
    for gpu in inventory.gpus:
        if gpu.gpu.name not in DISPLAY_ONLY:
            devices.append(GpuDevice(gpu))
            devices += [GpuDevice(gpu, mig) for mig in gpu.mig]
    return devices


def _name(device: GpuDevice, config: Config) -> str:
    """Return the name of *device* by the strategy, or its index if CDI does not allow the name."""
    if config.device_id_strategy == settings.INDEX:
        return device.name(settings.INDEX)
    return device.name(settings.UUID) or device.name(settings.INDEX)


def _gpu_spec(inventory: Inventory, config: Config, style: gpu_edits.Style, roots: Roots) -> Spec:
    devices = _devices(inventory)
    named = {
        name: gpu_edits.device_edits(device, style)
        for device in devices
        if (name := _name(device, config))
    }
    # A GPU in MIG mode is used through its MIG devices only.
    usable = [device for device in devices if device.mig or not device.gpu.gpu.mig_enabled]
    union = gpu_edits.merged(gpu_edits.device_edits(device, style) for device in usable)
    if usable:
        named[ALL] = union
    driver = inventory.driver
    if NO_IPC in config.cdi_feature_flags:
        driver = driver_files.without(driver, "ipc")
    links = [link for device in usable if not device.mig for link in device.gpu.links]
    common = gpu_edits.common_edits(driver, inventory.control_nodes, links, style)
    return _spec(GPU, list(named.items()), common, roots)


def _spec(class_: str, devices: Sequence[tuple[str, Edits]], common: Edits, roots: Roots) -> Spec:
    """Return the spec of *devices* (name, edits) with the paths of the host."""
    kind = f"{VENDOR}/{class_}"
    on_host = [(name, _on_host(edits, roots)) for name, edits in devices]
    return generate.spec(kind, on_host, _on_host(common, roots))


def _on_host(edits: Edits, roots: Roots) -> Edits:
    """Return *edits* with the host paths of nodes and mounts as the host has them."""
    result = Edits(**edits)
    if "deviceNodes" in edits:
        nodes = []
        for node in edits["deviceNodes"]:
            path = node.get("hostPath", node["path"])
            host_path = moved(path, roots.dev, roots.host_dev)
            copy = {key: value for key, value in node.items() if key != "hostPath"}
            if host_path != node["path"]:
                copy = {"path": node["path"], "hostPath": host_path, **copy}
            nodes.append(copy)
        result["deviceNodes"] = nodes  # type: ignore[typeddict-item]  # the members of nodes
    if "mounts" in edits:
        result["mounts"] = [
            {**mount, "hostPath": moved(mount["hostPath"], roots.driver, roots.host_driver)}
            for mount in edits["mounts"]
        ]
    return result


def moved(path: str, old: str, new: str) -> str:
    """Return *path* with the directory *new* in place of *old*, unchanged if it is not below."""
    old, new = old.rstrip("/"), new.rstrip("/")
    if old == new or not f"{path}/".startswith(f"{old}/"):
        return path
    return posixpath.normpath(f"{new}/{path[len(old) :].lstrip('/')}")
