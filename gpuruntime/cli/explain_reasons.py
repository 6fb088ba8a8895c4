# SPDX-License-Identifier: Apache-2.0
"""The reasons for a request, for the edits of a container, and for what is left out; pure."""

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
from gpuruntime.request import capabilities, driver_options, parse, requirements
from gpuruntime.request.container import Container, shown
from gpuruntime.request.parse import Request

# Member of edits → the kind of its items, and the member of an item that identifies it.
_MEMBERS = {
    "env": ("env", ""),
    "deviceNodes": ("device", "path"),
    "netDevices": ("net device", "hostInterfaceName"),
    "mounts": ("mount", "containerPath"),
    "hooks": ("hook", "args"),
    "additionalGids": ("group", ""),
}
GPU, LEFT_OUT, REMOVED, HAS = "gpu", "left out", "removed", "has"
# What a hook does → the option of our hook and the subcommand of the incumbent's that do it.
_HOOK_WORDS = {
    "makes links to the driver's files": ("--link", gpu_edits.LINKS),
    "prefers newer CUDA libraries of the image": (
        *("--cuda-compat", "--cuda-compat-cuda", gpu_edits.COMPAT),
    ),
    "adds the libraries to the loader cache": ("--library", gpu_edits.LDCACHE),
    "tells the driver not to make device nodes": ("--mask-params", gpu_edits.PARAMS),
    "tells the driver's libraries which GPUs the container has": (
        *("--application-profile", gpu_edits.PROFILE),
    ),
    "opens the directories of device nodes to all users": ("--chmod", gpu_edits.CHMOD),
    "mounts the driver's files in mode legacy": ("prestart",),
}
_HOOK_STEPS = {word: step for step, words in _HOOK_WORDS.items() for word in words}
_IN_PLACE = "marks that the devices have been added"
# (member of edits, what identifies the item) → why it is there.
Whys = dict[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the container gets *what*, which is of *kind*, or does not get it."""

    kind: str
    what: str
    why: str


def mode(request: Request, config: Config) -> tuple[str, str]:
    """Return the mode of *request*, or the one it would have, and how `auto` resolves to it."""
    if config.mode != settings.AUTO:
        return request.mode or config.mode, ""
    if not request.devices:
        return request.mode or settings.JIT, "auto: no qualified name is requested"
    how = "all" if request.mode == settings.CDI else "not all"
    return request.mode, f"auto: {how} names are qualified"


def of_request(request: Request, container: Container) -> str:
    """Return which part of the container requests the devices."""
    if request.source == parse.ANNOTATIONS:
        prefixes = container.config.annotation_prefixes
        keys = sorted(key for key in container.document["annotations"] if key.startswith(prefixes))
        return f"annotations {shown(keys)}"
    if request.source == parse.MOUNTS:
        return f"mounts {shown(container.mount_names())}"
    if request.source == parse.IMAGE:
        version = container.value("CUDA_VERSION")
        return f"CUDA_VERSION={shown([version])} without {parse.VISIBLE_DEVICES}: an old image"
    swarm = [name for name in container.config.swarm if name in container.environment]
    names = swarm or [parse.VISIBLE_DEVICES]
    return ", ".join(f"{name}={shown([container.value(name)])}" for name in names)


def of_no_request(request: Request, container: Container, *, has_devices: bool) -> str:
    """Return why the container requests nothing, or why its requests are ignored.

    With *has_devices*, its config.json has devices already.
    """
    names = [name for name in container.config.swarm if name in container.environment]
    name = names[0] if names else parse.VISIBLE_DEVICES
    words = container.words(name)
    if request.ignored:
        return "its requests are ignored"
    if name not in container.environment:
        return f"{name} is not set, and nothing else requests a device"
    if "void" in words:
        if has_devices:
            return f'{name} is "void": the devices have been added already'
        return f'{name} is "void", which requests no device'
    if not words:
        return f"{name} is empty, which requests no device"
    return f"{name}={shown([container.value(name)])} is ignored"


def of_capabilities(request: Request, container: Container) -> str:
    """Return what decides the driver capabilities."""
    variable = driver_options.DRIVER_CAPABILITIES
    if not request.is_automatic:
        return f"those of the CDI spec: {variable} has no effect"
    key = "nvidia-container-runtime.modes.jit-cdi.driver-capabilities"
    if container.config[key] == "all" and request.mode != settings.LEGACY:
        return f'"{key}" is "all"'
    if container.words(variable):
        return f"{variable}={shown([container.value(variable)])}"
    if variable not in container.environment and container.is_old_image:
        return "all, because the image has an old CUDA version"
    return f"{variable} is {'empty' if variable in container.environment else 'not set'}"


def of_unchecked_requirements(request: Request, container: Container) -> str:
    """Return why requirements of the image are not checked, "" if they are or there are none."""
    written = any(name.startswith(driver_options.REQUIRE) for name in container.environment)
    if request.extras.requirements or not (written or container.is_old_image):
        return ""
    if not request.is_automatic:
        return "not checked in mode cdi"
    if container.config["disable-require"]:
        return 'not checked: "disable-require" is set'
    if requirements.is_true(container.value(driver_options.DISABLE_REQUIRE)):
        return f"not checked: {driver_options.DISABLE_REQUIRE} is set"
    return ""


def of_edits(edits: Edits, whys: Mapping[tuple[str, str], str], other: str) -> list[Reason]:
    """Return the reason for each item of *edits*: the one in *whys*, or *other*."""
    reasons = []
    for member, (kind, _) in _MEMBERS.items():
        items: Iterable[Any] = edits.get(member) or ()  # type: ignore[assignment]
        for item in items:
            # The kind is printed apart.
            one: Edits = {member: [item]}  # type: ignore[misc]  # one of the members of edits
            what = describe(one)[0][len(kind) + 1 :]
            reasons.append(Reason(kind, what, whys.get(key(member, item), other)))
    if edits.get("intelRdt"):
        reasons.append(Reason("intelRdt", "class of resources", other))
    return reasons


def of_consequences(edits: Edits) -> Whys:
    """Return what each hook of ours or of the incumbent does, and what each group is for."""
    whys: Whys = {}
    for hook in edits.get("hooks") or ():
        words = dict.fromkeys(hook.get("args") or ())
        steps = dict.fromkeys(_HOOK_STEPS[word] for word in words if word in _HOOK_STEPS)
        if steps:
            whys[key("hooks", hook)] = ", ".join(steps)
    paths: dict[int, list[str]] = {}
    for node in edits.get("deviceNodes") or ():
        paths.setdefault(node.get("gid", 0), []).append(node["path"])
    for gid, of_gid in paths.items():
        whys["additionalGids", str(gid)] = f"may use {', '.join(of_gid)}"
    return whys


def of_specs(request: Request, specs: Registry, default_kind: str) -> Whys:
    """Return why each item that CDI specs add for *request* is added."""
    if request.driver_only:
        return of_devices((), specs, specs.names(default_kind))
    return of_devices(request.devices, specs, request.devices)


def of_devices(devices: Iterable[str], specs: Registry, of_common: Iterable[str]) -> Whys:
    """Return why each item that *specs* add for *devices* is added.

    The items that the specs of the devices *of_common* add for all their devices are included.
    """
    whys: Whys = {}
    for name in of_common:
        file = specs.find(name)
        common = file.spec.get("containerEdits") if file is not None and file.spec else None
        if file is not None:
            _enter(whys, common or {}, f'for each device of the CDI spec "{file.path}"')
    for name in devices:
        file = specs.find(name)
        if file is not None:
            device = file.devices[name.partition("=")[2]]
            _enter(whys, device["containerEdits"], f'for "{name}", by the CDI spec "{file.path}"')
    return whys


def of_inventory(request: Request, inventory: Inventory) -> Whys:
    """Return why each item from *inventory* is added."""
    whys: Whys = {("env", "NVIDIA_VISIBLE_DEVICES=void"): _IN_PLACE}
    driver = driver_files.select(inventory.driver, request.extras.capabilities)
    for entry in gpu_edits.library_directories(driver):
        whys["env", entry] = "where the driver's libraries are"
    for device in from_inventory.requested_devices(request, inventory):
        name = title(device)
        whys["deviceNodes", device.gpu.node.container_path] = f"node of {name}"
        drm = device.gpu.drm if device.mig is None else ()
        whys.update({("deviceNodes", n.container_path): f"DRM node of {name}" for n in drm})
        caps = device.mig[1:] if device.mig else ()
        whys.update({("deviceNodes", n.container_path): f"grants {name}" for n in caps})
    variables = {feature: name for name, feature in driver_options.FEATURES.items()}
    variables |= {f"mig-{right}": name for name, right in driver_options.MIG.items()}
    variables[model.IMEX] = driver_options.IMEX_CHANNELS
    for feature, nodes in inventory.features.items():
        why = f"requested by {variables.get(feature, feature)}"
        whys.update({("deviceNodes", node.container_path): why for node in nodes})
    for node in inventory.control_nodes:
        whys["deviceNodes", node.container_path] = "control device, for every container with GPUs"
    with_required = {"", *capabilities.closed(request.extras.capabilities)}
    for item in _files(inventory):
        why = _why_file(item, request.extras.capabilities, with_required)
        whys["mounts", item.container_path] = why
    for file in inventory.gds_files:
        whys["mounts", file.container_path] = "requested by NVIDIA_GDS"
    return whys


def gpus_of(request: Request, inventory: Inventory) -> list[Reason]:
    """Return which GPUs and MIG devices the container gets, and which it does not get."""
    granted = from_inventory.requested_devices(request, inventory)
    names = [device.name(devices.INDEX) for device in granted]
    by_name: dict[str, str] = {}
    for word in () if request.driver_only else request.ids:
        for device in devices.devices([word], inventory.gpus, inventory.left_out):
            by_name.setdefault(device.name(devices.INDEX), word)
    requested = []
    others = []
    for device in all_devices(inventory):
        name = device.name(devices.INDEX)
        if name in names:
            why = f'requested as "{by_name.get(name, name)}"'
            requested.append(Reason(GPU, described(device), why))
        else:
            others.append(Reason(LEFT_OUT, title(device), _why_not(device, request)))
    others += [Reason(LEFT_OUT, device.title, device.reason) for device in inventory.left_out]
    return [*requested, *others]


def files_left_out(
    request: Request, inventory: Inventory, edits: Edits, config: Config
) -> Iterator[Reason]:
    """Yield the reason for each file of the driver that is not mounted."""
    if request.mode == settings.LEGACY:
        return
    mounted = {mount["containerPath"] for mount in edits.get("mounts") or ()}
    supported = config["supported-driver-capabilities"]
    for item in _files(inventory):
        if item.container_path in mounted:
            continue
        (name,) = driver_files.left_out(_only(item), _only())
        if isinstance(item, File) and item.kind == "ipc" and name in request.extras.capabilities:
            name = ""
        if not name:
            why = 'the feature flag "disable-ipc-discoverer" is set'
        elif name in supported or "all" in supported:
            why = f'for {name}: add "{name}" to {driver_options.DRIVER_CAPABILITIES}'
        else:
            why = f'for {name}: "supported-driver-capabilities" does not include it'
        yield Reason(LEFT_OUT, item.container_path, why)


def title(device: GpuDevice) -> str:
    """Return the name of *device* for a sentence."""
    kind = "GPU" if device.mig is None else "MIG device"
    return f"{kind} {device.name(devices.INDEX)}"


def described(device: GpuDevice) -> str:
    """Return the names of *device*: index, UUID, bus id and product."""
    gpu = device.gpu.gpu
    return " ".join(
        word for word in (device.name(devices.INDEX), device.uuid, gpu.bus_id, gpu.name) if word
    )


def _why_not(device: GpuDevice, request: Request) -> str:
    gpu = device.gpu.gpu
    if request.driver_only:
        return "only the driver is requested"
    if device.mig is None and gpu.mig_enabled:
        return "in MIG mode: its MIG devices are requested one by one"
    if request.ids == (devices.ALL,) and gpu.name in devices.DISPLAY_ONLY:
        return 'it only drives a display, and "all" does not include it'
    return "not requested"


def all_devices(inventory: Inventory) -> Iterator[GpuDevice]:
    """Yield each GPU of *inventory*, followed by its MIG devices."""
    for gpu in inventory.gpus:
        yield GpuDevice(gpu)
        for mig in gpu.mig:
            yield GpuDevice(gpu, mig)


def _files(inventory: Inventory) -> list[Library | File]:
    return [*inventory.driver.libraries, *inventory.driver.files]


def _why_file(item: Library | File, named: Iterable[str], with_required: set[str]) -> str:
    if not item.capability:
        return "for every capability"
    if item.capability in named:
        return f"for {item.capability}"
    if item.capability in with_required:
        return f"for {item.capability}, which another capability requires"
    return f"for {item.capability}; a library of another capability needs it"


def _only(*items: Library | File) -> model.Driver:
    return model.Driver(
        version="",
        libraries=tuple(item for item in items if isinstance(item, Library)),
        files=tuple(item for item in items if isinstance(item, File)),
    )


def _enter(whys: Whys, edits: Edits, why: str) -> None:
    for member in _MEMBERS:
        for item in edits.get(member) or ():  # type: ignore[attr-defined]  # lists, all of them
            whys.setdefault(key(member, item), why)


def key(member: str, item: Any) -> tuple[str, str]:  # noqa: ANN401 (an item of any member)
    """Return the key of *item* of the member *member* of edits in Whys."""
    name = _MEMBERS[member][1]
    return member, str(item[name] if name and name in item else item)
