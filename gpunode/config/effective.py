# SPDX-License-Identifier: Apache-2.0
"""The configuration in force: command line before environment before file before default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpunode.config import settings
from gpunode.config.file import ConfigFile
from gpunode.config.settings import Setting
from gpunode.config.sharing import Sharing, SharingKind, sharing
from gpuruntime.errors import ArgumentError, ConfigError
from gpuruntime.plan import gpu_edits

_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9._-]{0,20}\Z")
_MIG_NAME = "/mig-"
# Feature flags of CDI specs that have an effect.
NO_IPC = "disable-ipc-discoverer"
NO_GROUPS = "no-additional-gids-for-device-nodes"


@dataclass(frozen=True, slots=True)
class OptionText:
    """The text of an option, and what has set it: `--mig-strategy`, or a variable."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings in force, by the names of settings.SETTINGS, and how resources are shared.

    *container_driver_root* and *nvidia_cdi_hook_path* are None if nothing sets them. *warnings*
    are sentences about settings that have no effect or seldom the desired one.
    """

    mig_strategy: str = settings.NONE
    fail_on_init_error: bool = True
    device_list_strategy: tuple[str, ...] = (settings.ENVVAR,)
    device_id_strategy: str = settings.UUID
    pass_device_specs: bool = False
    nvidia_driver_root: str = "/"
    nvidia_dev_root: str = "/"
    container_driver_root: str | None = None
    cdi_annotation_prefix: str = settings.CDI_ANNOTATION_PREFIX
    nvidia_cdi_hook_path: str | None = None
    cdi_feature_flags: tuple[str, ...] = ()
    cdi_disable_hooks: tuple[str, ...] = ()
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    mps_root: str = ""
    shared_devices_allocation_policy: str = settings.DISTRIBUTED
    device_discovery_strategy: str = settings.AUTO
    imex_channel_ids: tuple[int, ...] = ()
    imex_required: bool = False
    kubelet_socket: str = settings.KUBELET_SOCKET
    cri_socket: str = ""
    cdi_spec_dir: str = settings.CDI_SPEC_DIR
    health_quiet_time: float = 600.0
    sharing: Sharing | None = None
    warnings: tuple[str, ...] = ()


def effective(options: Mapping[str, OptionText], file: ConfigFile) -> Config:
    """Return the configuration of *options* by name, and of *file*.

    Raises ArgumentError for an option, ConfigError for a value of the file, and one of both for
    settings that exclude each other.
    """
    values: dict[str, Any] = {}
    for setting in settings.SETTINGS:
        option = options.get(setting.name)
        if option is not None:
            values[setting.name] = setting.parse(option.text, option.origin)
        else:
            value = file.get(setting.path) if setting.key else None
            values[setting.name] = setting.default if value is None else _of_file(setting, value)
    values["nvidia_dev_root"] = values["nvidia_dev_root"] or values["nvidia_driver_root"]
    # An empty path means the default, as with the incumbent.
    values["nvidia_cdi_hook_path"] = values["nvidia_cdi_hook_path"] or None
    places = {name: option.origin for name, option in options.items()}
    _check_values(values, places, file)
    shared = sharing(file)
    if shared is not None and shared.kind is SharingKind.MPS:
        _check_mps(shared, values, file)
    return Config(**values, sharing=shared, warnings=tuple(_warnings(values, file)))


def _of_file(setting: Setting, value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return the checked *value* of the file in the type of *setting*."""
    if setting.kind in (settings.WORDS, settings.INTEGERS):
        items = value if isinstance(value, list) else [value]
        return tuple(dict.fromkeys(items))
    if setting.kind == settings.DURATION:
        return settings.duration(value.strip() if isinstance(value, str) else int(value))
    return value


def _refuse(
    name: str, problem: str, hint: str, places: Mapping[str, str], file: ConfigFile
) -> ConfigError:
    """Return the error for the setting *name*: with its option, or with its line in *file*."""
    setting = settings.BY_NAME[name]
    if name not in places and setting.key and file.get(setting.path) is not None:
        return file.error(setting.path, f'"{setting.key}" {problem}', hint)
    return ArgumentError(f"{places.get(name, f'--{setting.option}')} {problem}", hint)


def _check_values(values: Mapping[str, Any], places: Mapping[str, str], file: ConfigFile) -> None:
    """Raise ArgumentError or ConfigError for a value that is not allowed."""
    strategies = values["device_list_strategy"]
    if not strategies or (settings.AUTO in strategies and len(strategies) > 1):
        hint = f"use auto, or one or several of {', '.join(settings.LIST_STRATEGIES)}"
        problem = f'is "{",".join(strategies)}"'
        raise _refuse("device_list_strategy", problem, hint, places, file)
    if values["device_discovery_strategy"] == settings.TEGRA:
        problem, hint = 'is "tegra", which is not supported', "use nvml"
        raise _refuse("device_discovery_strategy", problem, hint, places, file)
    if set(values["imex_channel_ids"]) - {0}:
        problem = f'is "{",".join(map(str, values["imex_channel_ids"]))}"'
        raise _refuse("imex_channel_ids", problem, "use 0, or no channel", places, file)
    if not _PREFIX.match(values["cdi_annotation_prefix"]):
        problem = f'is "{values["cdi_annotation_prefix"]}", not the beginning of annotations'
        hint = f'use "{settings.CDI_ANNOTATION_PREFIX}"'
        raise _refuse("cdi_annotation_prefix", problem, hint, places, file)
    for name in ("mps_root", "nvidia_cdi_hook_path", "kubelet_socket", "cri_socket"):
        path = values[name]
        if path and (not path.startswith("/") or "\0" in path):
            problem, hint = f'is "{path}", not an absolute path', "begin it with /"
            raise _refuse(name, problem, hint, places, file)
    hooks = (gpu_edits.ALL_HOOKS, *gpu_edits.HOOKS)
    for hook in values["cdi_disable_hooks"]:
        if hook not in hooks:
            problem, hint = f'has the unknown hook "{hook}"', f"use some of {', '.join(hooks)}"
            raise _refuse("cdi_disable_hooks", problem, hint, places, file)


def _check_mps(shared: Sharing, values: Mapping[str, Any], file: ConfigFile) -> None:
    """Raise ConfigError if sharing by MPS excludes another setting."""
    place = ("sharing", SharingKind.MPS.value)
    if values["mig_strategy"] == settings.MIXED:
        raise file.error(
            place,
            "using --mig-strategy=mixed is not supported with MPS (sharing.mps)",
            'use "--mig-strategy" none, or remove "sharing.mps"',
        )
    for resource in shared.resources:
        if _MIG_NAME in resource.name:
            problem = f'sharing using MPS is not supported for MIG devices: "{resource.name}"'
            raise file.error(place, problem, 'use "sharing.timeSlicing" for MIG devices')
    if not values["mps_root"]:
        raise file.error(
            place,
            '"sharing.mps" needs the root directory of MPS, and --mps-root is not set',
            'name it with "--mps-root", MPS_ROOT or "flags.mpsRoot"',
        )


def _warnings(values: Mapping[str, Any], file: ConfigFile) -> list[str]:
    warnings = []
    if file.get(("resources",)):
        warnings.append('"resources" of the config file has no effect: names are fixed')
    prefix = values["cdi_annotation_prefix"]
    if prefix != settings.CDI_ANNOTATION_PREFIX:
        default = settings.CDI_ANNOTATION_PREFIX
        warnings.append(
            f'engines read no annotation with the prefix "{prefix}" unless they are configured '
            f'to: the usual prefix is "{default}"'
        )
    warnings += [
        f'the CDI feature flag "{flag}" has no effect'
        for flag in values["cdi_feature_flags"]
        if flag not in (NO_IPC, NO_GROUPS)
    ]
    return warnings
