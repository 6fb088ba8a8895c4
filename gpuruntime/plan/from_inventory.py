# SPDX-License-Identifier: Apache-2.0
"""Compute the grant for a request from the inventory of the machine; pure.

On the start path. Devices of CDI specs get the edits of the spec instead: see sources.py.
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
_COMPAT_ROOT = "nvidia-container-runtime.modes.csv.compat-container-root"
_NO_GROUPS = "no-additional-gids-for-device-nodes"


def style(config: Config, hook_path: str, *, cuda_compat: bool = True) -> Style:
    """Return the style of edits under *config*; *cuda_compat*: with the hook of that name."""
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
        compat_root=config[_COMPAT_ROOT].rstrip("/"),
        groups=_NO_GROUPS not in config.features and _NO_GROUPS not in flags,
    )


def hook_deadline(config: Config) -> int:
    """Return the deadline of a hook in seconds, at most the largest that a hook accepts."""
    return min(int(config["hook-deadline"]), gpu_edits.MAX_HOOK_DEADLINE_S)


def _ldconfig(config: Config) -> str:
    """Return the path of the host's ldconfig, "" unless the configuration allows its use."""
    if config["ldconfig-mode"] != "host":
        return ""
    return str(config["nvidia-container-cli.ldconfig"]).partition("@")[2]


def requested_devices(request: Request, inventory: Inventory) -> list[GpuDevice]:
    """Return the devices of *request*; raise RequestError and UnresolvedDeviceError."""
    if request.driver_only:
        return []
    ids = request.ids
    if inventory.driver.platform == model.WSL and devices.NONE not in ids:
        # One device node serves all GPUs.
        ids = (devices.ALL,)
    selected = devices.devices(ids, inventory.gpus, inventory.left_out)
    if not selected and devices.NONE not in request.ids:
        raise _no_gpu(inventory)
    return selected


def _no_gpu(inventory: Inventory) -> UnresolvedDeviceError:
    """Return the error for a request for all GPUs on a machine where none is available."""
    sentences = dict.fromkeys([*inventory.problems, *map(str, inventory.left_out)])
    why = "".join(f"; {sentence}" for sentence in sentences)
    hint = 'check that "nvidia-smi -L" lists a GPU on the host'
    return UnresolvedDeviceError(
        f"all GPUs are requested, but no GPU is available{why}",
        inventory.left_out[0].hint if inventory.left_out else hint,
    )


def grant(request: Request, inventory: Inventory, config: Config, style: Style) -> Grant:
    """Return the grant for *request*.

    In the legacy mode it does not include the driver files, which a prestart hook mounts. Raises
    RequestError for a requirement that is not met, and UnresolvedDeviceError.
    """
    selected = requested_devices(request, inventory)
    extras = request.extras
    notes = requirements.check(extras.requirements, facts(selected, inventory))
    notes += _platform_notes(request, inventory)
    is_legacy = request.mode == settings.LEGACY
    with_graphics = not is_legacy or bool(_GRAPHICS & set(extras.capabilities))
    notes += [
        f"GPU {device.gpu.gpu.index} is in MIG mode: CUDA needs one of its MIG devices"
        for device in selected
        if device.mig is None and device.gpu.gpu.mig_enabled
    ]
    parts = [
        gpu_edits.device_edits(_with_drm(device, keep=with_graphics), style) for device in selected
    ]
    parts.append(gpu_edits.node_edits(_feature_nodes(extras, inventory, notes), style))
    parts.append(gpu_edits.node_edits(_control_nodes(extras, inventory), style))
    if not is_legacy:
        files = driver_edits(request, inventory, config, style)
        parts.append(files.edits)
        notes += files.notes
    # A request for all GPUs gets fewer than it may expect if there are problems.
    warnings = inventory.problems if devices.ALL in request.ids else ()
    return Grant(gpu_edits.merged(parts), notes=notes, warnings=warnings)


def driver_edits(request: Request, inventory: Inventory, config: Config, style: Style) -> Grant:
    """Return the grant of driver files for *request*, with the hooks that set them up.

    Raises RequestError and UnresolvedDeviceError.
    """
    notes: list[str] = []
    driver = _driver(request.extras, inventory, config, notes)
    gpus = [device.gpu for device in requested_devices(request, inventory) if not device.mig]
    links = [link for gpu in gpus for link in gpu.links]
    cuda = gpu_edits.tegra_cuda(inventory, style)
    return Grant(gpu_edits.common_edits(driver, (), links, style, cuda), notes=notes)


def _platform_notes(request: Request, inventory: Inventory) -> list[str]:
    """Return sentences about the platform that was chosen, and what it ignores of *request*."""
    notes = [inventory.decision] if inventory.decision else []
    if inventory.driver.platform == model.WSL:
        ids = [name for name in request.ids if name not in (devices.ALL, devices.NONE)]
        if ids:
            notes.append(f"WSL has one device for all GPUs: {', '.join(ids)} gets all of them")
    return notes


def facts(selected: list[GpuDevice], inventory: Inventory) -> requirements.Facts:
    """Return the facts for requirement checks of a container that gets *selected*."""
    gpus = {device.gpu.gpu.index: device.gpu.gpu for device in selected}
    return requirements.Facts(
        cuda=inventory.cuda_version,
        driver=inventory.driver.version,
        gpus=tuple((gpu.index, gpu.architecture, gpu.brand) for gpu in gpus.values()),
    )


def _with_drm(device: GpuDevice, *, keep: bool) -> GpuDevice:
    if keep:
        return device
    gpu = model.GpuNodes(
        gpu=device.gpu.gpu, node=device.gpu.node, mig=device.gpu.mig, others=device.gpu.others
    )
    return devices.GpuDevice(gpu, device.mig)


def _control_nodes(options: DriverOptions, inventory: Inventory) -> list[Node]:
    """Return the control nodes, including required nodes that do not exist.

    Only the platform of NVML has any.
    """
    if inventory.driver.platform != model.NVML:
        return []
    nodes = {node.container_path: node for node in inventory.control_nodes}
    needed = [_CONTROL]
    if capabilities.COMPUTE in capabilities.closed(options.capabilities):
        needed.append(_UNIFIED_MEMORY)
    for path in needed:
        # The existing nodes show the dev root.
        root = next((n.host_path[: -len(p)] for p, n in nodes.items()), "")
        node = model.Node(host_path=f"{root}{path}", container_path=path)
        nodes.setdefault(path, node)
    return [nodes[path] for path in sorted(nodes)]


def _feature_nodes(options: DriverOptions, inventory: Inventory, notes: list[str]) -> list[Node]:
    """Return the nodes of features; raise UnresolvedDeviceError if a named one is missing."""
    selected: list[Node] = []
    for feature in options.features:
        nodes = inventory.features[feature]
        if not nodes:
            variable = next(
                name for name, value in driver_options.FEATURES.items() if value == feature
            )
            notes.append(f"{variable}=enabled adds nothing: the host has no such device node")
        incomplete = model.missing_nodes(feature, nodes)
        if incomplete:
            notes.append(incomplete)
        selected += nodes
    channels = {node.container_path: node for node in inventory.features[model.IMEX]}
    for channel in options.imex:
        path = f"{_CHANNELS}/channel{channel}"
        if path not in channels:
            raise UnresolvedDeviceError(
                f'IMEX channel {channel} not found at "{path}"',
                "create the channel on the host, or request one that exists",
            )
        selected.append(channels[path])
    for right in options.mig:
        nodes = inventory.features[f"mig-{right}"]
        if not nodes:
            raise UnresolvedDeviceError(
                f"the host has no device node for the right to {right} MIG devices",
                'run "nvidia-smi" on a host with MIG, which creates the nodes',
            )
        selected += nodes
    return selected


def _driver(
    options: DriverOptions, inventory: Inventory, config: Config, notes: list[str]
) -> Driver:
    """Return the driver's files for the capabilities of *options*."""
    extra = [model.ALL_CSV] if options.all_csv else []
    driver = driver_files.select(inventory.driver, [*options.capabilities, *extra])
    omitted = driver_files.left_out(inventory.driver, driver)
    omitted.pop(model.ALL_CSV, None)
    if omitted:
        notes.append(
            f"{sum(omitted.values())} driver files are left out; to include them, add "
            f"{', '.join(sorted(omitted))} to NVIDIA_DRIVER_CAPABILITIES"
        )
    if "disable-ipc-discoverer" in config[f"{_JIT}.nvcdi-feature-flags"]:
        driver = driver_files.without(driver, "ipc")
    if model.GDS in options.features:
        driver = model.Driver(
            version=driver.version,
            libraries=driver.libraries,
            files=(*driver.files, *inventory.gds_files),
            problems=driver.problems,
            platform=driver.platform,
        )
    return driver
