# SPDX-License-Identifier: Apache-2.0
"""The reasons why each thing is in a container's edits, or is left out; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cdi.edits import describe
from cdi.registry import Registry
from cdi.wire import Edits
from gpuruntime import config as settings
from gpuruntime import model
from gpuruntime.config import Config
from gpuruntime.model import File, Inventory, Library
from gpuruntime.plan import devices, driver_files, from_inventory, gpu_edits
from gpuruntime.plan.devices import GpuDevice
from gpuruntime.request import capabilities, driver_options
from gpuruntime.request.parse import Request

# Member of edits → what one of its items is called, and the member of it that tells it.
_MEMBERS = {
    "env": ("env", ""),
    "deviceNodes": ("device", "path"),
    "netDevices": ("net device", "hostInterfaceName"),
    "mounts": ("mount", "containerPath"),
    "hooks": ("hook", "args"),
    "additionalGids": ("group", ""),
}
GPU, LEFT_OUT, REMOVED = "gpu", "left out", "removed"
# Option of our hook's command line, or the name of one of the incumbent's → what it is for.
_HOOK_STEPS = {
    "--link": "makes links to the driver's files",
    "--cuda-compat": "lets newer CUDA libraries of the image count",
    "--library": "enters the libraries into the loader's cache",
    "--mask-params": "hides that the driver may make device nodes",
    "--application-profile": "tells the driver's libraries which GPUs there are",
    "--chmod": "lets everybody into the directories of nodes",
    gpu_edits.LINKS: "makes links to the driver's files",
    gpu_edits.COMPAT: "lets newer CUDA libraries of the image count",
    gpu_edits.LDCACHE: "enters the libraries into the loader's cache",
    gpu_edits.PARAMS: "hides that the driver may make device nodes",
    gpu_edits.PROFILE: "tells the driver's libraries which GPUs there are",
    gpu_edits.CHMOD: "lets everybody into the directories of nodes",
    "prestart": "mounts the driver's files, in the mode legacy",
}
_IN_PLACE = "tells who looks later that the devices have been added"
# (member of edits, what tells the item) → why it is there.
_Whys = dict[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why *what*, which is of *kind*, is there, or is not."""

    kind: str
    what: str
    why: str


def of_edits(edits: Edits, whys: Mapping[tuple[str, str], str], other: str) -> list[Reason]:
    """Return the reason for each thing that *edits* add: one of *whys*, or *other*."""
    found = []
    for member, (kind, _) in _MEMBERS.items():
        items: Iterable[Any] = edits.get(member) or ()  # type: ignore[assignment]
        for item in items:
            # Without the word for its kind.
            one: Edits = {member: [item]}  # type: ignore[misc]  # one of the members of edits
            what = describe(one)[0][len(kind) + 1 :]
            found.append(Reason(kind, what, whys.get(_key(member, item), other)))
    if edits.get("intelRdt"):
        found.append(Reason("intelRdt", "class of resources", other))
    return found


def of_consequences(edits: Edits) -> _Whys:
    """Return what each hook of ours or of the incumbent's does, and what groups are for."""
    found: _Whys = {}
    for hook in edits.get("hooks") or ():
        words = dict.fromkeys(hook.get("args") or ())
        steps = dict.fromkeys(_HOOK_STEPS[word] for word in words if word in _HOOK_STEPS)
        if steps:
            found[_key("hooks", hook)] = ", ".join(steps)
    paths: dict[int, list[str]] = {}
    for node in edits.get("deviceNodes") or ():
        paths.setdefault(node.get("gid", 0), []).append(node["path"])
    for gid, of_gid in paths.items():
        found["additionalGids", str(gid)] = f"may use {', '.join(of_gid)}"
    return found


def of_specs(asked: Request, known: Registry, default_kind: str) -> _Whys:
    """Return why each thing of CDI specs is there."""
    whys: _Whys = {}
    files = [file for name in asked.devices if (file := known.find(name)) is not None]
    if asked.driver_only:
        found = (known.find(name) for name in known.names(default_kind))
        files = [file for file in found if file is not None]
    for file in files:
        common = file.spec.get("containerEdits") if file.spec else None
        _enter(whys, common or {}, f'for each device of the CDI spec "{file.path}"')
    for name in asked.devices:
        file = known.find(name)
        if file is not None:
            device = file.devices[name.partition("=")[2]]
            _enter(whys, device["containerEdits"], f'for "{name}", by the CDI spec "{file.path}"')
    return whys


def of_machine(asked: Request, machine: Inventory) -> _Whys:
    """Return why each thing of what the machine has now is there."""
    whys: _Whys = {("env", "NVIDIA_VISIBLE_DEVICES=void"): _IN_PLACE}
    for device in from_inventory.requested_devices(asked, machine):
        name = title(device)
        whys["deviceNodes", device.gpu.node.container_path] = f"node of {name}"
        drm = device.gpu.drm if device.mig is None else ()
        whys.update({("deviceNodes", n.container_path): f"DRM node of {name}" for n in drm})
        caps = device.mig[1:] if device.mig else ()
        whys.update({("deviceNodes", n.container_path): f"grants {name}" for n in caps})
    variables = {feature: name for name, feature in driver_options.FEATURES.items()}
    variables |= {f"mig-{right}": name for name, right in driver_options.MIG.items()}
    variables[model.IMEX] = driver_options.IMEX_CHANNELS
    for feature, nodes in machine.features.items():
        why = f"asked for by {variables.get(feature, feature)}"
        whys.update({("deviceNodes", node.container_path): why for node in nodes})
    for node in machine.control_nodes:
        whys["deviceNodes", node.container_path] = "control device, for every container with GPUs"
    wanted = {"", *capabilities.closed(asked.extras.capabilities)}
    for item in _files(machine):
        why = _why_file(item, asked.extras.capabilities, wanted)
        whys["mounts", item.container_path] = why
    for file in machine.gds_files:
        whys["mounts", file.container_path] = "asked for by NVIDIA_GDS"
    return whys


def gpus_of(asked: Request, machine: Inventory) -> list[Reason]:
    """Return which GPUs and MIG devices the container gets and which not."""
    granted = from_inventory.requested_devices(asked, machine)
    names = [device.name(devices.INDEX) for device in granted]
    by_name: dict[str, str] = {}
    for word in () if asked.driver_only else asked.ids:
        for device in devices.devices([word], machine.gpus):
            by_name.setdefault(device.name(devices.INDEX), word)
    found = []
    others = []
    for device in _all(machine):
        name = device.name(devices.INDEX)
        if name in names:
            why = f'asked for as "{by_name.get(name, name)}"'
            found.append(Reason(GPU, _described(device), why))
        else:
            others.append(Reason(LEFT_OUT, title(device), _why_not(device, asked)))
    return [*found, *others]


def files_left_out(
    asked: Request, machine: Inventory, edits: Edits, config: Config
) -> Iterator[Reason]:
    """Yield why each file of the driver that is not mounted is not."""
    if asked.mode == settings.LEGACY:
        return
    mounted = {mount["containerPath"] for mount in edits.get("mounts") or ()}
    supported = config["supported-driver-capabilities"]
    for item in _files(machine):
        if item.container_path in mounted:
            continue
        (name,) = driver_files.left_out(_only(item), _only())
        if isinstance(item, File) and item.kind == "ipc" and name in asked.extras.capabilities:
            name = ""
        if not name:
            why = 'the feature flag "disable-ipc-discoverer" is set'
        elif name in supported or "all" in supported:
            why = f'for {name}: add "{name}" to {driver_options.DRIVER_CAPABILITIES}'
        else:
            why = f'for {name}: "supported-driver-capabilities" does not have it'
        yield Reason(LEFT_OUT, item.container_path, why)


def title(device: GpuDevice) -> str:
    """Return what *device* is called in a sentence."""
    kind = "GPU" if device.mig is None else "MIG device"
    return f"{kind} {device.name(devices.INDEX)}"


def _described(device: GpuDevice) -> str:
    gpu = device.gpu.gpu
    return " ".join(
        word for word in (device.name(devices.INDEX), device.uuid, gpu.bus_id, gpu.name) if word
    )


def _why_not(device: GpuDevice, asked: Request) -> str:
    gpu = device.gpu.gpu
    if asked.driver_only:
        return "the driver alone is asked for"
    if device.mig is None and gpu.mig_enabled:
        return "in MIG mode; its MIG devices are asked for by themselves"
    if asked.ids == (devices.ALL,) and gpu.name in devices.DISPLAY_ONLY:
        return 'it only drives a display, and "all" does not mean it'
    return "not asked for"


def _all(machine: Inventory) -> Iterator[GpuDevice]:
    for gpu in machine.gpus:
        yield GpuDevice(gpu)
        for mig in gpu.mig:
            yield GpuDevice(gpu, mig)


def _files(machine: Inventory) -> list[Library | File]:
    return [*machine.driver.libraries, *machine.driver.files]


def _why_file(item: Library | File, asked: Iterable[str], wanted: set[str]) -> str:
    if not item.capability:
        return "for every capability"
    if item.capability in asked:
        return f"for {item.capability}"
    if item.capability in wanted:
        return f"for {item.capability}, which another capability brings"
    return f"for {item.capability}; a library that is asked for needs it"


def _only(*items: Library | File) -> model.Driver:
    return model.Driver(
        version="",
        libraries=tuple(item for item in items if isinstance(item, Library)),
        files=tuple(item for item in items if isinstance(item, File)),
    )


def _enter(whys: _Whys, edits: Edits, why: str) -> None:
    for member in _MEMBERS:
        for item in edits.get(member) or ():  # type: ignore[attr-defined]  # lists, all of them
            whys.setdefault(_key(member, item), why)


def _key(member: str, item: Any) -> tuple[str, str]:  # noqa: ANN401 (an item of any member)
    name = _MEMBERS[member][1]
    return member, str(item[name] if name and name in item else item)
