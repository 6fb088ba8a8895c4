# SPDX-License-Identifier: Apache-2.0
"""Make a CDI spec of this machine from options: shared by `cdi generate` and `cdi refresh`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from cdi import generate, names, version
from cdi.errors import CdiError
from cdi.wire import Edits, Spec
from gpuruntime import model, probes, remedies
from gpuruntime.cli import config_in_force, features
from gpuruntime.cli.comma_option import CommaOption
from gpuruntime.discover import csv_files, fingerprint, platforms, tegra
from gpuruntime.discover import inventory as machine
from gpuruntime.errors import ArgumentError, ConfigError, DiscoveryError, SpecError, escape
from gpuruntime.model import Inventory
from gpuruntime.plan import devices, driver_files, gpu_edits
from gpuruntime.request import capabilities
from gpuruntime.system.clean_names import is_clean

AUTO, NVML, MANAGEMENT = platforms.AUTO, model.NVML, "management"
# The modes of discovery by the platform of the machine.
PLATFORM_MODES = (AUTO, NVML, model.WSL, model.CSV)
_SINGLE_DEVICE = "disable-multiple-csv-devices"
# Annotations of a GPU; the first is the incumbent's.
COHERENT = "gpu.nvidia.com/coherent"
MEMORY_NODE = "gpuruntime/memory-numa-node"
INCUMBENTS_HOOK = "nvidia-cdi-hook"
FEATURES = (
    "disable-ipc-discoverer",
    _SINGLE_DEVICE,
    "no-additional-gids-for-device-nodes",
)


class GenerateOptions(NamedTuple):
    """What to generate; the fields are the command's options.

    Not a dataclass, whose import would take a tenth of the command's time.
    """

    driver_root: str
    dev_root: str
    mode: str
    vendor: str
    class_: str
    device_ids: tuple[str, ...]
    name_strategies: tuple[str, ...]
    no_all_device: bool
    library_search_paths: tuple[str, ...]
    config_search_paths: tuple[str, ...]
    hook_path: str
    ldconfig_path: str
    disabled_hooks: tuple[str, ...]
    enabled_hooks: tuple[str, ...]
    separate_hooks: bool
    feature_flags: tuple[str, ...]
    driver_capabilities: tuple[str, ...]
    annotations: bool
    additional_gids: bool
    max_spec_version: str
    # With defaults: the options that an older version has saved lack them.
    csv_files: tuple[str, ...] = ()
    csv_ignore_patterns: tuple[str, ...] = ()
    csv_compat_root: str = ""
    program_search_paths: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of the spec's devices."""
        return f"{self.vendor}/{self.class_}"

    @property
    def csv(self) -> tegra.CsvOptions:
        """The options for the CSV files of a Tegra."""
        return tegra.CsvOptions(
            files=self.csv_files,
            ignore_patterns=self.csv_ignore_patterns,
            library_search_path=self.library_search_paths,
            single_device=_SINGLE_DEVICE in self.feature_flags,
        )


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a generator to a click command, as keyword arguments."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _twins(*variables: str) -> list[str]:
    return [f"GPURUNTIME_CDI_{variables[0]}", *(f"NVIDIA_CTK_{v}" for v in variables[1:])]


_OPTIONS = (
    click.option(
        "--driver-root",
        envvar=["GPURUNTIME_DRIVER_ROOT", "NVIDIA_CTK_DRIVER_ROOT"],
        help="Directory below which the driver is installed.  [default: config.toml's, or /]",
    ),
    click.option(
        "--dev-root",
        envvar=["GPURUNTIME_DEV_ROOT", "NVIDIA_CTK_DEV_ROOT"],
        help='Directory whose "dev" holds the device nodes.  [default: the driver root]',
    ),
    click.option(
        "--mode",
        "--discovery-mode",
        default=AUTO,
        envvar=_twins("MODE", "CDI_GENERATE_MODE"),
        help="nvml, wsl or csv for containers that use GPUs on Linux, WSL or a Tegra, management "
        f"for those that look after GPUs; {', '.join(features.MODES)} for these nodes alone.  "
        "[default: auto, by the platform]",
    ),
    click.option(
        "--vendor",
        "--cdi-vendor",
        envvar=_twins("VENDOR", "CDI_GENERATE_VENDOR"),
        help="Vendor of the kind.  [default: nvidia.com; management.nvidia.com in that mode]",
    ),
    click.option(
        "--class",
        "--cdi-class",
        "class_",
        envvar=_twins("CLASS", "CDI_GENERATE_CLASS"),
        help="Class of the kind.  [default: gpu, or what the mode is for]",
    ),
    click.option(
        *("--device-id", "--device-ids", "--device", "--devices", "device_ids"),
        cls=CommaOption,
        envvar=_twins("DEVICE_IDS", "CDI_GENERATE_DEVICE_IDS"),
        help="Device to name: an index, a UUID, a channel, all, or none.  [default: all]",
    ),
    click.option(
        *("--device-name-strategy", "name_strategies"),
        cls=CommaOption,
        envvar=_twins("DEVICE_NAME_STRATEGIES", "CDI_GENERATE_DEVICE_NAME_STRATEGIES"),
        help="index, uuid, type-index; a device has a name by each.  [default: index, uuid]",
    ),
    click.option(
        "--no-all-device",
        is_flag=True,
        envvar=_twins("NO_ALL_DEVICE", "CDI_GENERATE_NO_ALL_DEVICE"),
        help='Leave out the device "all".',
    ),
    click.option(
        *("--driver-capabilities", "driver_capabilities"),
        cls=CommaOption,
        envvar=_twins("DRIVER_CAPABILITIES"),
        help="Only the driver's files for these: compute, utility, graphics, ….  [default: all]",
    ),
    click.option(
        *("--library-search-path", "library_search_paths"),
        cls=CommaOption,
        envvar=_twins("LIBRARY_SEARCH_PATHS", "CDI_GENERATE_LIBRARY_SEARCH_PATHS"),
        help="Directory of the driver's libraries, in place of the usual ones.",
    ),
    click.option(
        *("--config-search-path", "config_search_paths"),
        cls=CommaOption,
        envvar=_twins("CONFIG_SEARCH_PATHS", "CDI_GENERATE_CONFIG_SEARCH_PATHS"),
        help="Directory of the driver's other files, in place of the usual ones.",
    ),
    click.option(
        *("--program-search-path", "program_search_paths"),
        cls=CommaOption,
        envvar=_twins("PROGRAM_SEARCH_PATHS"),
        help="Directory of the driver's programs, in place of the usual ones and PATH.",
    ),
    click.option(
        "--hook-path",
        "--nvidia-cdi-hook-path",
        "--nvidia-ctk-path",
        envvar=_twins("HOOK_PATH", "CDI_HOOK_PATH"),
        help="Path of gpu-cdi-hook on the hosts that use the spec.  [default: the installed one]",
    ),
    click.option(
        "--ldconfig-path",
        default="",
        envvar=_twins("LDCONFIG_PATH", "CDI_GENERATE_LDCONFIG_PATH"),
        help="ldconfig of the host, for hooks that run it.",
    ),
    click.option(
        *("--disable-hook", "--disable-hooks", "disabled_hooks"),
        cls=CommaOption,
        envvar=_twins("DISABLED_HOOKS", "CDI_GENERATE_DISABLED_HOOKS"),
        help=f"Step to leave out: {', '.join(gpu_edits.HOOKS)}, or all.",
    ),
    click.option(
        *("--enable-hook", "--enable-hooks", "enabled_hooks"),
        cls=CommaOption,
        envvar=_twins("ENABLED_HOOKS", "CDI_GENERATE_ENABLED_HOOKS"),
        help=f"Step to have all the same; {gpu_edits.CHMOD} is left out unless named.",
    ),
    click.option(
        "--separate-hooks",
        is_flag=True,
        envvar=_twins("SEPARATE_HOOKS"),
        help="One hook a step, as the incumbent writes them, in place of one for all.",
    ),
    click.option(
        *("--feature-flag", "--feature-flags", "feature_flags"),
        cls=CommaOption,
        envvar=_twins("FEATURE_FLAGS", "CDI_GENERATE_FEATURE_FLAGS"),
        help=f"One of {', '.join(FEATURES)}.",
    ),
    click.option(
        *("--csv.file", "csv_files"),
        cls=CommaOption,
        envvar=_twins("CSV_FILES", "CDI_GENERATE_CSV_FILES"),
        help="CSV file of a Tegra.  [default: devices.csv, drivers.csv, l4t.csv in "
        f"{csv_files.DIRECTORY}]",
    ),
    click.option(
        *("--csv.ignore-pattern", "csv_ignore_patterns"),
        cls=CommaOption,
        envvar=_twins("CSV_IGNORE_PATTERNS", "CDI_GENERATE_CSV_IGNORE_PATTERNS"),
        help="Pattern of sym entries to leave out: of the path, or of the name after **/.",
    ),
    click.option(
        *("--csv.compat-container-root", "csv_compat_root"),
        default="",
        envvar=_twins("CSV_COMPAT_CONTAINER_ROOT", "CDI_GENERATE_CSV_CONTAINER_COMPAT_ROOT"),
        help="Directory of CUDA in images for Orin.  [default: /usr/local/cuda/compat_orin]",
    ),
    click.option(
        "--annotations",
        is_flag=True,
        envvar=_twins("ANNOTATIONS"),
        help="Note the driver's version in the spec, for consumers of CDI 0.6.0.",
    ),
    click.option(
        "--additional-gids",
        is_flag=True,
        envvar=_twins("ADDITIONAL_GIDS"),
        help="Give a container the groups of its nodes, for consumers of CDI 0.7.0.",
    ),
    click.option(
        "--max-spec-version",
        default="",
        envvar=_twins("MAX_SPEC_VERSION"),
        metavar="VERSION",
        help="Leave out what this version of the format does not have.",
    ),
)


def checked(**values: Any) -> GenerateOptions:  # noqa: ANN401 (click's values)
    """Return the checked values of the command's options, with defaults; raise ConfigError.

    Warnings go to standard error.
    """
    values["driver_root"] = values["driver_root"] or config_in_force.driver_root()
    values["dev_root"] = values["dev_root"] or values["driver_root"]
    values["mode"] = _mode(values["mode"].lower())
    default_vendor = "management.nvidia.com" if values["mode"] == MANAGEMENT else "nvidia.com"
    values["vendor"] = values["vendor"] or default_vendor
    is_feature = values["mode"] in features.MODES
    default_class = features.class_of(values["mode"]) if is_feature else "gpu"
    values["class_"] = values["class_"] or default_class
    values["name_strategies"] = values["name_strategies"] or (devices.INDEX, devices.UUID)
    values["device_ids"] = values["device_ids"] or (devices.ALL,)
    values["driver_capabilities"] = values["driver_capabilities"] or (devices.ALL,)
    _check_words("device name strategy", values["name_strategies"], devices.STRATEGIES)
    _check_words(
        "driver capability", values["driver_capabilities"], (devices.ALL, *capabilities.ALL)
    )
    _check_words("hook", values["disabled_hooks"], (devices.ALL, *gpu_edits.HOOKS))
    _check_words("hook", values["enabled_hooks"], gpu_edits.HOOKS)
    compat_root = values["csv_compat_root"] = values["csv_compat_root"].rstrip("/")
    if compat_root and not is_clean(compat_root):
        raise ArgumentError(
            f'"--csv.compat-container-root": "{compat_root}" is not a plain absolute path',
            "name the directory as images have it, such as /usr/local/cuda/compat_orin",
        )
    limit = values["max_spec_version"]
    if limit and limit.removeprefix("v") not in version.KNOWN:
        raise ArgumentError(
            f'the CDI version "{limit}" is not known', f"use one of {', '.join(version.KNOWN)}"
        )
    for flag in values["feature_flags"]:
        if flag not in FEATURES:
            text = f'the feature flag "{flag}" has no effect'
            click.echo(f"warning: {escape(text)}", err=True)
    try:
        names.check_vendor(values["vendor"])
        names.check_class(values["class_"])
    except CdiError as error:
        raise ArgumentError(
            error.message, 'choose others with "--vendor" and "--class"'
        ) from error
    if devices.NONE in values["device_ids"] and not values["no_all_device"]:
        click.echo('warning: with the device "none" there is no device "all"', err=True)
        values["no_all_device"] = True
    values["hook_path"] = _hook_path(values["hook_path"])
    return GenerateOptions(**values)


def discover(chosen: GenerateOptions) -> Inventory:
    """Read the machine for *chosen*; raise ConfigError, DriverError and DiscoveryError."""
    if chosen.mode in features.MODES:
        return machine.discover_features(chosen.driver_root, chosen.dev_root, chosen.mode)
    inventory = machine.discover(
        chosen.driver_root,
        chosen.dev_root,
        mode=NVML if chosen.mode == MANAGEMENT else chosen.mode,
        csv=chosen.csv,
        library_search_path=chosen.library_search_paths,
        config_search_path=chosen.config_search_paths,
        program_search_path=chosen.program_search_paths,
        management=chosen.mode == MANAGEMENT,
    )
    decisive = [name for name in chosen.device_ids if name in (devices.ALL, devices.NONE)]
    if decisive[:1] == [devices.ALL]:
        _check_whole(inventory)
    return inventory


def _check_whole(inventory: Inventory) -> None:
    """Raise DiscoveryError if a MIG device lacks its nodes.

    A container with the device "all" would see only the GPU, which it cannot use.
    """
    if any(len(item.mig) < len(item.gpu.mig_devices) for item in inventory.gpus):
        raise DiscoveryError(
            "; ".join(inventory.problems),
            remedies.missing_node(remedies.LiveHost(), "/dev/nvidia-caps"),
        )


def from_plain(options: dict[str, Any]) -> GenerateOptions:
    """Return the options that a stamp has saved as JSON."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    return GenerateOptions(**values)


def state_of(chosen: GenerateOptions) -> dict[str, Any]:
    """Return the state of the host that *chosen* depends on; raise DiscoveryError."""
    return probes.read(
        fingerprint.plan(
            chosen.driver_root,
            chosen.dev_root,
            chosen.library_search_paths,
            chosen.config_search_paths,
            program_search_paths=chosen.program_search_paths,
            csv=chosen.csv,
        )
    )


def document(chosen: GenerateOptions, inventory: Inventory) -> Spec:
    """Return the spec of *inventory*.

    Raises RequestError or UnresolvedDeviceError for a device id, and SpecError.
    """
    named, common = _parts(chosen, inventory)
    if not named and any(not item.gpu.uuid for item in inventory.gpus):
        raise DiscoveryError(
            f"no device has a name by the strategy {', '.join(chosen.name_strategies)}",
            'use "--device-name-strategy index": the GPUs of this platform have no UUIDs',
        )
    if not named:
        raise DiscoveryError(
            f"there is no device to name: {'; '.join(inventory.problems) or 'no GPU'}",
            'make MIG devices with "nvidia-smi mig", or name a GPU with "--device-id"',
        )
    try:
        spec = generate.spec(
            chosen.kind,
            named,
            common,
            annotations=_annotations(chosen, inventory),
            device_annotations=_device_annotations(chosen, inventory),
        )
    except CdiError as error:
        raise SpecError(
            f"the generated spec is invalid: {error}",
            'choose another kind with "--vendor" and "--class"',
        ) from error
    return _lowered(spec, chosen.max_spec_version) if chosen.max_spec_version else spec


def _parts(chosen: GenerateOptions, inventory: Inventory) -> tuple[list[tuple[str, Edits]], Edits]:
    """Return the devices, (name, edits), and the edits that they have in common."""
    style = _style(chosen)
    if chosen.mode in features.MODES:
        named = features.feature_devices(
            chosen.mode,
            chosen.device_ids,
            inventory,
            style,
            with_all=not chosen.no_all_device,
        )
        return named, features.feature_edits()
    driver = inventory.driver
    if devices.ALL not in chosen.driver_capabilities:
        driver = driver_files.select(driver, chosen.driver_capabilities)
    elif driver.platform == model.CSV:
        # Without the files of other CSV files than the usual ones.
        driver = driver_files.select(driver, capabilities.ALL)
    if "disable-ipc-discoverer" in chosen.feature_flags:
        driver = driver_files.without(driver, "ipc")
    if chosen.mode == MANAGEMENT:
        named = [(devices.ALL, gpu_edits.management_edits(inventory.management_nodes, style))]
        return named, gpu_edits.common_edits(driver, (), (), style)
    if driver.platform == model.WSL:
        # One device node serves all GPUs, whichever ids are named.
        (gpu,) = inventory.gpus
        edits = gpu_edits.device_edits(devices.GpuDevice(gpu), style)
        return [(devices.ALL, edits)], gpu_edits.common_edits(driver, (), (), style)
    selected = devices.devices(chosen.device_ids, inventory.gpus, inventory.left_out)
    if devices.NONE in chosen.device_ids and not selected:
        named = [(devices.NONE, gpu_edits.empty_device())]
    else:
        named = gpu_edits.named_devices(
            selected, chosen.name_strategies, style, with_all=not chosen.no_all_device
        )
    links = [link for device in selected if not device.mig for link in device.gpu.links]
    cuda = gpu_edits.tegra_cuda(inventory, style)
    return named, gpu_edits.common_edits(driver, inventory.control_nodes, links, style, cuda)


def summary(inventory: Inventory, spec: Spec) -> str:
    """Return the last line of a command: the counts, and the missing files and devices."""
    gpus = sum(not gpu.gpu.mig_enabled for gpu in inventory.gpus)
    migs = sum(len(gpu.mig) for gpu in inventory.gpus)
    files = len(spec.get("containerEdits", Edits()).get("mounts", []))
    numbers: tuple[tuple[int, str], ...] = ((gpus, "GPU"), (migs, "MIG device"), (files, "file"))
    if inventory.driver.platform == model.WSL:
        numbers = ((1, "device for all GPUs"), (files, "file"))
    elif not inventory.driver.libraries:
        # The discovery looked only for features.
        nodes = {
            node["path"]
            for device in spec["devices"]
            for node in device["containerEdits"].get("deviceNodes", [])
        }
        numbers = ((len(nodes), "device node"),)
    missing = "; ".join(problems(inventory)) or "none"
    counts = ", ".join(f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in numbers)
    return f"{counts}; required and missing: {missing}"


def problems(inventory: Inventory) -> tuple[str, ...]:
    """Return sentences about missing files, and devices that were left out."""
    driver = inventory.driver
    missing = [driver.missing_program] if driver.libraries else []
    return (*inventory.problems, *driver.problems, *filter(None, missing))


def _mode(mode: str) -> str:
    if mode in PLATFORM_MODES or mode == MANAGEMENT or mode in features.MODES:
        return mode
    raise ArgumentError(
        f'invalid discovery mode: "{mode}"',
        f"use {', '.join((*PLATFORM_MODES, MANAGEMENT, *features.MODES))}",
    )


def _check_words(noun: str, words: tuple[str, ...], valid_words: tuple[str, ...]) -> None:
    for word in words:
        if word not in valid_words:
            raise ArgumentError(f'invalid {noun}: "{word}"', f"use {', '.join(valid_words)}")


def _style(chosen: GenerateOptions) -> gpu_edits.Style:
    # A management container manages the nodes, and has no graphics.
    without = (gpu_edits.PARAMS, gpu_edits.PROFILE) if chosen.mode == MANAGEMENT else ()
    return gpu_edits.Style(
        chosen.hook_path,
        disabled=(*chosen.disabled_hooks, *without),
        enabled=chosen.enabled_hooks,
        separate=chosen.separate_hooks,
        ldconfig=chosen.ldconfig_path,
        compat_root=chosen.csv_compat_root,
        groups=chosen.additional_gids
        and "no-additional-gids-for-device-nodes" not in chosen.feature_flags,
    )


def _annotations(chosen: GenerateOptions, inventory: Inventory) -> dict[str, str] | None:
    if not chosen.annotations:
        return None
    return {"gpuruntime/driver-version": inventory.driver.version}


def _device_annotations(
    chosen: GenerateOptions, inventory: Inventory
) -> dict[str, dict[str, str]]:
    """Return name → annotations of the full GPUs: whether their memory is coherent, and where."""
    by_name: dict[str, dict[str, str]] = {}
    for item in inventory.gpus if chosen.annotations else ():
        annotations = {COHERENT: "true" if item.gpu.coherent else "false"}
        if item.gpu.memory_node >= 0:
            annotations[MEMORY_NODE] = str(item.gpu.memory_node)
        device = devices.GpuDevice(item)
        names_of_device = (device.name(strategy) for strategy in chosen.name_strategies)
        by_name.update((name, annotations) for name in names_of_device if name)
    return by_name


def _lowered(spec: Spec, max_version: str) -> Spec:
    """Return *spec* for readers of *max_version*, and warn of dropped parts; raise SpecError."""
    try:
        lowered, dropped = generate.lower(spec, max_version)
    except CdiError as error:
        raise SpecError(
            f"the spec cannot be written for version {max_version}: {error}",
            'leave out "--max-spec-version", or name a newer one',
        ) from error
    for line in dropped:
        click.echo(f"warning: left out of {escape(line)}", err=True)
    return lowered


def _hook_path(option: str | None) -> str:
    """Return the absolute path of the hook that the spec names; raise ConfigError if unknown."""
    if option and option.startswith("/"):
        return option
    # Under the incumbent's name, its programs must be able to use the spec too.
    is_incumbent = os.path.basename(sys.argv[0]) == "nvidia-ctk"
    name = os.path.basename(option or (INCUMBENTS_HOOK if is_incumbent else gpu_edits.HOOK_NAME))
    # Beside the command, which may be called through a symlink, or beside the interpreter that
    # runs a module.
    programs = (os.path.realpath(sys.argv[0]), os.path.abspath(sys.executable))
    directories = [os.path.dirname(program) for program in programs]
    # A large import, needed only without a path of the hook.
    import shutil  # noqa: PLC0415

    path = shutil.which(name, path=os.pathsep.join(directories)) or shutil.which(name)
    if path is None:
        raise ConfigError(
            f'"{name}" is neither beside this program nor on PATH',
            'name it by its absolute path with "--hook-path"',
        )
    return os.path.abspath(path)
