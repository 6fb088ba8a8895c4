# SPDX-License-Identifier: Apache-2.0
"""A request and the machine's inventory → the grant; pure.

On the start path. For devices of CDI specs, whoever wrote the spec has decided: see sources.py.
"""

from __future__ import annotations

from gpuruntime import config as settings
from gpuruntime import model
from gpuruntime.errors import UnresolvedDeviceError
from gpuruntime.grant import Grant
from gpuruntime.plan import devices, driver_files, gpu_edits
from gpuruntime.request import capabilities, driver_options, requirements

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuruntime.config import Config
    from gpuruntime.model import Driver, Inventory, Node
    from gpuruntime.plan.devices import GpuDevice
    from gpuruntime.plan.gpu_edits import Style
    from gpuruntime.request.driver_options import DriverOptions
    from gpuruntime.request.parse import Request

_CONTROL = "/dev/nvidiactl"
_UNIFIED_MEMORY = "/dev/nvidia-uvm"
_CHANNELS = "/dev/nvidia-caps-imex-channels"
_GRAPHICS = frozenset({capabilities.GRAPHICS, capabilities.DISPLAY})
_JIT = "nvidia-container-runtime.modes.jit-cdi"
_NO_GROUPS = "no-additional-gids-for-device-nodes"


def style(config: Config, hook_path: str, *, cuda_compat: bool = True) -> Style:
    """Return how edits are written under *config*, without that step if not *cuda_compat*."""
    flags = config[f"{_JIT}.nvcdi-feature-flags"]
    disabled = list(config[f"{_JIT}.nvcdi-disable-hooks"])
    mode = config["ldconfig-mode"]
    if not cuda_compat or "disable-cuda-compat-lib-hook" in config.features:
        disabled.append(gpu_edits.COMPAT)
    return gpu_edits.Style(
        hook_path,
        disabled=disabled,
        ldconfig=_ldconfig(config),
        ldconfig_mode="" if mode == "merge" else mode,
        deadline_s=hook_deadline(config),
        groups=_NO_GROUPS not in config.features and _NO_GROUPS not in flags,
    )


def hook_deadline(config: Config) -> int:
    """Return the seconds that a hook has, of those that it takes."""
    return min(int(config["hook-deadline"]), gpu_edits.MAX_HOOK_DEADLINE_S)


def _ldconfig(config: Config) -> str:
    """Return the host's ldconfig, "" unless it may be run."""
    if config["ldconfig-mode"] != "host":
        return ""
    return str(config["nvidia-container-cli.ldconfig"]).partition("@")[2]


def requested_devices(asked: Request, inventory: Inventory) -> list[GpuDevice]:
    """Return the devices of *asked*; raise RequestError and UnresolvedDeviceError."""
    if asked.driver_only:
        return []
    found = devices.devices(asked.ids, inventory.gpus, inventory.left_out)
    if not found and devices.NONE not in asked.ids:
        raise _no_gpu(inventory)
    return found


def _no_gpu(inventory: Inventory) -> UnresolvedDeviceError:
    """Return the error for a request for all GPUs on a machine that can give none."""
    sentences = dict.fromkeys([*inventory.problems, *map(str, inventory.left_out)])
    why = "".join(f"; {sentence}" for sentence in sentences)
    hint = 'check that "nvidia-smi -L" lists a GPU on the host'
    return UnresolvedDeviceError(
        f"all GPUs are requested, but no GPU is available{why}",
        inventory.left_out[0].hint if inventory.left_out else hint,
    )


def grant(asked: Request, inventory: Inventory, config: Config, style: Style) -> Grant:
    """Return what *asked* gets of the machine.

    In the legacy mode without the driver's files, which a prestart hook mounts. Raises
    RequestError for a requirement that is not met, and UnresolvedDeviceError.
    """
    found = requested_devices(asked, inventory)
    more = asked.extras
    notes = requirements.check(more.requirements, facts(found, inventory))
    is_legacy = asked.mode == settings.LEGACY
    with_graphics = not is_legacy or bool(_GRAPHICS & set(more.capabilities))
    notes += [
        f"GPU {device.gpu.gpu.index} is in MIG mode: CUDA needs one of its MIG devices"
        for device in found
        if device.mig is None and device.gpu.gpu.mig_enabled
    ]
    parts = [
        gpu_edits.device_edits(_with_drm(device, wanted=with_graphics), style) for device in found
    ]
    parts.append(gpu_edits.node_edits(_feature_nodes(more, inventory, notes), style))
    parts.append(gpu_edits.node_edits(_control_nodes(more, inventory), style))
    if not is_legacy:
        files = driver_edits(asked, inventory, config, style)
        parts.append(files.edits)
        notes += files.notes
    # Some of all is less than what was asked for.
    warnings = inventory.problems if devices.ALL in asked.ids else ()
    return Grant(gpu_edits.merged(parts), notes=notes, warnings=warnings)


def driver_edits(asked: Request, inventory: Inventory, config: Config, style: Style) -> Grant:
    """Return what of the driver's files *asked* gets, and what has to be done with them.

    Raises RequestError and UnresolvedDeviceError.
    """
    notes: list[str] = []
    driver = _driver(asked.extras, inventory, config, notes)
    gpus = [device.gpu for device in requested_devices(asked, inventory) if not device.mig]
    links = [link for gpu in gpus for link in gpu.links]
    return Grant(gpu_edits.common_edits(driver, (), links, style), notes=notes)


def facts(found: list[GpuDevice], inventory: Inventory) -> requirements.Facts:
    """Return what requirements are compared with, for a container that gets *found*."""
    gpus = {device.gpu.gpu.index: device.gpu.gpu for device in found}
    return requirements.Facts(
        cuda=inventory.cuda_version,
        driver=inventory.driver.version,
        gpus=tuple((gpu.index, gpu.architecture, gpu.brand) for gpu in gpus.values()),
    )


def _with_drm(device: GpuDevice, *, wanted: bool) -> GpuDevice:
    if wanted:
        return device
    gpu = model.GpuNodes(gpu=device.gpu.gpu, node=device.gpu.node, mig=device.gpu.mig)
    return devices.GpuDevice(gpu, device.mig)


def _control_nodes(more: DriverOptions, inventory: Inventory) -> list[Node]:
    """Return the control nodes, also those that are missing and without which nothing works."""
    found = {node.container_path: node for node in inventory.control_nodes}
    needed = [_CONTROL]
    if capabilities.COMPUTE in capabilities.closed(more.capabilities):
        needed.append(_UNIFIED_MEMORY)
    for path in needed:
        # Below another dev root, the nodes that are there tell where.
        root = next((n.host_path[: -len(p)] for p, n in found.items()), "")
        node = model.Node(host_path=f"{root}{path}", container_path=path)
        found.setdefault(path, node)
    return [found[path] for path in sorted(found)]


def _feature_nodes(more: DriverOptions, inventory: Inventory, notes: list[str]) -> list[Node]:
    """Return the nodes of features; raise UnresolvedDeviceError if one by name is missing."""
    found: list[Node] = []
    for feature in more.features:
        nodes = inventory.features[feature]
        if not nodes:
            variable = next(
                name for name, value in driver_options.FEATURES.items() if value == feature
            )
            notes.append(f"{variable}=enabled adds nothing: the host has no such device node")
        found += nodes
    channels = {node.container_path: node for node in inventory.features[model.IMEX]}
    for channel in more.imex:
        path = f"{_CHANNELS}/channel{channel}"
        if path not in channels:
            raise UnresolvedDeviceError(
                f'IMEX channel {channel} not found at "{path}"',
                "make the channel on the host, or ask for one that is there",
            )
        found.append(channels[path])
    for right in more.mig:
        nodes = inventory.features[f"mig-{right}"]
        if not nodes:
            raise UnresolvedDeviceError(
                f"the host has no device node for the right to {right} MIG devices",
                'run "nvidia-smi" on a host with MIG, which makes them',
            )
        found += nodes
    return found


def _driver(more: DriverOptions, inventory: Inventory, config: Config, notes: list[str]) -> Driver:
    """Return the driver's files for the capabilities of *more*."""
    driver = driver_files.select(inventory.driver, more.capabilities)
    missing = driver_files.left_out(inventory.driver, driver)
    if missing:
        notes.append(
            f"{sum(missing.values())} files of the driver are left out; "
            f"they are for {', '.join(sorted(missing))}: add that to NVIDIA_DRIVER_CAPABILITIES"
        )
    if "disable-ipc-discoverer" in config[f"{_JIT}.nvcdi-feature-flags"]:
        driver = driver_files.without(driver, "ipc")
    if model.GDS in more.features:
        driver = model.Driver(
            version=driver.version,
            libraries=driver.libraries,
            files=(*driver.files, *inventory.gds_files),
            problems=driver.problems,
        )
    return driver
