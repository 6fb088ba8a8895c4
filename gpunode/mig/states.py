# SPDX-License-Identifier: Apache-2.0
"""The GPUs as the writer reports them, and the states that they get; pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunode import mig_config, mig_profiles
from gpunode.layouts import ComputeInstance, GpuInstance, GpuProfile, RequestedInstance
from gpunode.mig_config import Entry, MigConfig
from gpunode.mig_profiles import Profile
from gpunode.model import NodeGpu
from gpuruntime.errors import ConfigError
from gpuruntime.model import Gpu


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU with MIG as it is: its mode, that after a reset, and its instances."""

    index: int
    uuid: str
    bus_id: str
    device_id: str
    mode: bool
    pending: bool
    profiles: Mapping[str, GpuProfile]
    instances: tuple[GpuInstance, ...]
    holders: tuple[str, ...]

    @property
    def target(self) -> Target:
        """This state as a target."""
        instances = tuple(
            RequestedInstance(one.profile, tuple(each.slices for each in one.compute_instances))
            for one in self.instances
        )
        return Target(self.mode, instances)

    @property
    def all_holders(self) -> tuple[str, ...]:
        """What uses the GPU or one of its instances, in order."""
        of_instances = (holder for one in self.instances for holder in one.holders)
        return tuple(sorted({*self.holders, *of_instances}))


@dataclass(frozen=True, slots=True)
class Target:
    """The state that a GPU gets. *instances* is None where only the mode counts."""

    mode: bool
    instances: tuple[RequestedInstance, ...] | None

    def is_met(self, state: GpuState) -> bool:
        """Return whether *state* has the mode, none pending, and the layout."""
        return self.has_mode(state) and (
            self.instances is None or _counts(self.instances) == _counts(state.target.instances)
        )

    def has_mode(self, state: GpuState) -> bool:
        """Return whether *state* has the mode, and keeps it after a reset."""
        return state.mode == state.pending == self.mode

    def plain(self) -> dict[str, Any]:
        """Return the target as JSON values."""
        return {
            "mode": self.mode,
            "instances": None
            if self.instances is None
            else [[one.profile, list(one.compute_slices)] for one in self.instances],
        }


def from_plain(values: Mapping[str, Any]) -> Target:
    """Return the target that `Target.plain` returned; raise KeyError, TypeError, ValueError."""
    instances = values["instances"]
    if not isinstance(values["mode"], bool):
        raise TypeError("the mode is not a boolean")
    if instances is None:
        return Target(values["mode"], None)
    return Target(
        values["mode"],
        tuple(
            RequestedInstance(str(mig_profiles.parse(profile)), tuple(map(int, slices)))
            for profile, slices in instances
        ),
    )


def gpu_states(gpus: Sequence[Mapping[str, Any]]) -> dict[int, GpuState]:
    """Return index → state of the GPUs with MIG, from the operation `state`."""
    return {
        gpu["index"]: _state(gpu) for gpu in gpus if "error" not in gpu and gpu["mode"] is not None
    }


def node_gpus(gpus: Sequence[Mapping[str, Any]]) -> list[NodeGpu]:
    """Return the GPUs that answered, as far as the selection by a config needs them."""
    return [
        NodeGpu(
            Gpu(index=gpu["index"], uuid=gpu["uuid"], minor=-1, name=gpu["name"]),
            mig_capable=gpu["mode"] is not None,
            device_id=gpu["device_id"],
            subsystem_id=gpu["subsystem_id"],
        )
        for gpu in gpus
        if "error" not in gpu
    ]


def targets_of(
    config: MigConfig, gpus: Sequence[Mapping[str, Any]], *, mode_only: bool = False
) -> dict[int, Target]:
    """Return index → target of the GPUs that *config* covers.

    Raises ConfigError, also if a GPU that does not answer may be one of them: only its index is
    known.
    """
    for gpu in gpus:
        if "error" in gpu and any(
            entry.devices is None or gpu["index"] in entry.devices for entry in config.entries
        ):
            raise ConfigError(
                f"GPU {gpu['index']} does not answer: {gpu['error']}",
                "reset the GPU, or select a config that names the indices of the others",
            )
    states = gpu_states(gpus)
    targets = {}
    for index, entry in mig_config.requested_states(config, node_gpus(gpus)).items():
        instances = None
        if not mode_only:
            instances = tuple(
                mig_config.requested_instances(entry.mig_devices, states[index].profiles)
            )
        targets[index] = Target(entry.mig_enabled, instances)
    return targets


def exported(states: Mapping[int, GpuState], name: str) -> MigConfig:
    """Return the config that describes *states*; GPUs in the same state share an entry."""
    groups: list[tuple[bool, Counter[Profile], list[int]]] = []
    for index, state in sorted(states.items()):
        devices = Counter(
            _device(instance.profile, compute.slices)
            for instance in state.instances
            for compute in instance.compute_instances
        )
        group = next((one for one in groups if one[:2] == (state.mode, devices)), None)
        if group is None:
            groups.append((state.mode, devices, [index]))
        else:
            group[2].append(index)
    return MigConfig(
        name,
        tuple(Entry(tuple(indices), mode, devices) for mode, devices, indices in groups),
    )


def _device(profile: str, slices: int) -> Profile:
    whole = mig_profiles.parse(profile)
    return Profile(
        compute_slices=slices,
        gpu_slices=whole.gpu_slices,
        memory_gb=whole.memory_gb,
        added=whole.added,
        removed=whole.removed,
    )


def without_placements(profiles: Mapping[str, GpuProfile]) -> dict[str, GpuProfile]:
    """Return *profiles* for a plan of which NVML reports no placements: only counts limit it."""
    return {
        name: profile
        if profile.starts
        else dataclasses.replace(profile, size=0, starts=tuple(range(profile.limit)))
        for name, profile in profiles.items()
    }


def _state(gpu: Mapping[str, Any]) -> GpuState:
    profiles = {
        one["name"]: GpuProfile(
            one["name"], one["slices"], one["size"], tuple(sorted(one["starts"])), one["limit"]
        )
        for one in gpu["profiles"]
    }
    instances = tuple(
        GpuInstance(
            *(one["id"], one["profile"], one["start"], one["size"]),
            tuple(
                ComputeInstance(each["id"], each["slices"], tuple(each["holders"]))
                for each in one["compute"]
            ),
        )
        for one in gpu["instances"]
    )
    return GpuState(
        *(gpu["index"], gpu["uuid"], gpu["bus_id"], gpu["device_id"], gpu["mode"]),
        *(gpu["pending"], profiles, instances, tuple(gpu["holders"])),
    )


def _counts(
    instances: Sequence[RequestedInstance] | None,
) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter((one.profile, tuple(sorted(one.compute_slices))) for one in instances or ())
