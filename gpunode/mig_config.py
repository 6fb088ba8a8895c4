# SPDX-License-Identifier: Apache-2.0
"""The file of MIG configs, version v1: which GPUs get which MIG devices."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from gpunode import mig_profiles
from gpunode.config import file
from gpunode.layouts import RequestedInstance
from gpunode.mig_profiles import Profile
from gpunode.model import NodeGpu
from gpuruntime.errors import ArgumentError, ConfigError

_SCHEMA = os.path.join(os.path.dirname(__file__), "mig_schema.json")
ALL = "all"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a config: the requested state of some GPUs.

    *devices* are indices, None for all GPUs; *filters* are PCI identifiers in lower case, and the
    entry is for GPUs with one of them, or for any GPU if there are none. *line* is the line in the
    file, 0 without a file.
    """

    devices: tuple[int, ...] | None
    mig_enabled: bool
    mig_devices: Mapping[Profile, int] = field(default_factory=dict)
    filters: tuple[str, ...] = ()
    line: int = 0

    def is_for(self, gpu: NodeGpu) -> bool:
        """Return whether the entry is for *gpu*, by its index and its PCI identifiers."""
        if self.devices is not None and gpu.gpu.index not in self.devices:
            return False
        device, subsystem = gpu.device_id.lower(), gpu.subsystem_id.lower()
        return not self.filters or any(
            text in (device, f"{device}:{subsystem}") for text in self.filters
        )


@dataclass(frozen=True, slots=True)
class MigConfig:
    """A named config of the file *path*."""

    name: str
    entries: tuple[Entry, ...]
    path: str = ""


def read(path: str) -> dict[str, MigConfig]:
    """Return the configs of the file *path* by name.

    Raises ConfigError, with the line and the key, if the file cannot be read or one of its configs
    has an error.
    """
    source = file.read(path, _SCHEMA)
    return {name: _config(source, name) for name in source.values["mig-configs"]}


def select(configs: Mapping[str, MigConfig], name: str | None) -> MigConfig:
    """Return the config *name*, or the only one if *name* is None; raise ArgumentError."""
    if name is None:
        if len(configs) == 1:
            return next(iter(configs.values()))
        raise ArgumentError(
            f"no config is selected, and the file has {len(configs)}",
            f"select one of {', '.join(sorted(configs))}",
        )
    if name not in configs:
        raise ArgumentError(
            f'the file has no MIG config "{name}"', f"select one of {', '.join(sorted(configs))}"
        )
    return configs[name]


def requested_states(config: MigConfig, gpus: Sequence[NodeGpu]) -> dict[int, Entry]:
    """Return the entry for each GPU that *config* covers, by index; of several the last counts.

    GPUs without MIG are skipped unless an entry names their index. Raises ConfigError if an entry
    names a GPU that the node lacks, or wants MIG of one that has none.
    """
    states: dict[int, Entry] = {}
    by_index = {gpu.gpu.index: gpu for gpu in gpus}
    for entry in config.entries:
        for index in entry.devices or ():
            if index not in by_index:
                indices = ", ".join(map(str, sorted(by_index))) or "none"
                raise _error(
                    config, entry, f"GPU {index} is not on this node", f"its GPUs are {indices}"
                )
        for index, gpu in by_index.items():
            if not entry.is_for(gpu):
                continue
            if gpu.mig_capable:
                states[index] = entry
            elif entry.devices is not None and entry.mig_enabled:
                raise _error(
                    *(config, entry, f"GPU {index} ({gpu.gpu.name}) does not support MIG"),
                    "name GPUs that do",
                )
    return states


def requested_instances(
    mig_devices: Mapping[Profile, int], available: Iterable[str]
) -> list[RequestedInstance]:
    """Return the GPU instances that have *mig_devices*.

    *available* are the names of the GPU's profiles: a profile whose memory differs by one GB from
    one of these is the same. Compute instances that are smaller than their GPU instance share one,
    large ones first.
    """
    names = [mig_profiles.parse(name) for name in available]
    instances: list[RequestedInstance] = []
    shared: dict[str, list[int]] = {}
    for profile, count in mig_devices.items():
        whole = _whole(profile)
        same = min(
            (one for one in names if one.is_same(whole)),
            key=lambda one: abs(one.memory_gb - profile.memory_gb),
            default=whole,
        )
        if profile.compute_slices == profile.gpu_slices:
            instances += [RequestedInstance(str(same), (profile.gpu_slices,))] * count
        else:
            shared.setdefault(str(same), []).extend([profile.compute_slices] * count)
    for name, sizes in shared.items():
        instances += (RequestedInstance(name, parts) for parts in _packed(name, sizes))
    return instances


def written(configs: Mapping[str, MigConfig]) -> str:
    """Return the file, in YAML, that has *configs*."""
    return yaml.safe_dump(as_document(configs), sort_keys=False, default_flow_style=None)


def as_document(configs: Mapping[str, MigConfig]) -> dict[str, object]:
    """Return the content of the file that has *configs*."""
    return {
        "version": "v1",
        "mig-configs": {
            name: [_as_entry(entry) for entry in config.entries]
            for name, config in configs.items()
        },
    }


def _as_entry(entry: Entry) -> dict[str, object]:
    document: dict[str, object] = {}
    if entry.filters:
        document["device-filter"] = [_upper(text) for text in entry.filters]
    document["devices"] = ALL if entry.devices is None else list(entry.devices)
    document["mig-enabled"] = entry.mig_enabled
    if entry.mig_enabled:
        document["mig-devices"] = {str(one): count for one, count in entry.mig_devices.items()}
    return document


def _upper(text: str) -> str:
    """Return PCI identifiers with upper-case digits, as they are usually written."""
    return text.upper().replace("X", "x")


def _config(source: file.ConfigFile, name: str) -> MigConfig:
    place: file.Path = ("mig-configs", name)
    entries = tuple(_entry(source, (*place, index)) for index in range(len(source.get(place))))
    return MigConfig(name, entries, source.path)


def _entry(source: file.ConfigFile, place: file.Path) -> Entry:
    values = source.get(place)
    is_enabled, counts = values["mig-enabled"], values.get("mig-devices")
    if is_enabled and counts is None:
        raise source.error(
            *(place, 'the entry has "mig-enabled: true" and no "mig-devices"'),
            'add "mig-devices", a map of profiles and counts',
        )
    if not is_enabled and counts is not None:
        raise source.error(
            *((*place, "mig-devices"), 'the entry has "mig-devices" and "mig-enabled: false"'),
            'remove "mig-devices", or write "mig-enabled: true"',
        )
    if counts and not any(counts.values()):
        raise source.error(
            *((*place, "mig-devices"), "the count of every profile is 0"),
            'write the number of devices, or "mig-devices: {}"',
        )
    profiles = Counter[Profile]()
    for text, count in (counts or {}).items():
        try:
            profile = mig_profiles.parse(text)
        except ValueError as error:
            raise source.error(
                (*place, "mig-devices", text), str(error), "write the name of a profile"
            ) from error
        if count:
            profiles[profile] += count
    devices, filters = values["devices"], values.get("device-filter", ())
    return Entry(
        None if devices == ALL else tuple(devices),
        is_enabled,
        profiles,
        tuple(text.lower() for text in ([filters] if isinstance(filters, str) else filters)),
        source.line(place),
    )


def _error(config: MigConfig, entry: Entry, problem: str, hint: str) -> ConfigError:
    where = f'"{config.path}", line {entry.line}: ' if config.path else ""
    return ConfigError(f'{where}MIG config "{config.name}": {problem}', hint)


def _whole(profile: Profile) -> Profile:
    """Return the profile of the GPU instance that has MIG devices of *profile*."""
    return Profile(
        compute_slices=profile.gpu_slices,
        gpu_slices=profile.gpu_slices,
        memory_gb=profile.memory_gb,
        added=profile.added,
        removed=profile.removed,
    )


def _packed(name: str, sizes: Iterable[int]) -> list[tuple[int, ...]]:
    """Return *sizes* in groups that each fit into a GPU instance of the profile *name*."""
    slices = mig_profiles.parse(name).gpu_slices
    groups: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        group = next((one for one in groups if sum(one) + size <= slices), None)
        if group is None:
            groups.append([size])
        else:
            group.append(size)
    return [tuple(group) for group in groups]
