# SPDX-License-Identifier: Apache-2.0
"""Generate the file of MIG configs for the GPUs of a node; pure.

The configs are `all-disabled`, `all-enabled`, for each profile as many devices as fit,
`all-1g.5gb`, and `all-balanced`. What fits is tried with the placements that NVML reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpunode import layouts, mig_profiles
from gpunode.layouts import GpuProfile, LayoutError, RequestedInstance
from gpunode.mig_config import Entry, MigConfig
from gpunode.mig_profiles import Profile

# The compute slices of the devices of `all-balanced`, by the compute slices of the GPU.
_BALANCED = {7: (1, 1, 2, 3), 4: (1, 1, 2)}


@dataclass(frozen=True, slots=True)
class GpuKind:
    """GPUs of the node with equal profiles, by their PCI identifier, `0x20B010DE`."""

    device_id: str
    profiles: Mapping[str, GpuProfile]


def configs(kinds: Sequence[GpuKind]) -> dict[str, MigConfig]:
    """Return the configs for GPUs of *kinds*, by name."""
    entries = {
        "all-disabled": [Entry(None, mig_enabled=False)],
        "all-enabled": [Entry(None, mig_enabled=True)],
    }
    names = {name for kind in kinds for name in kind.profiles}
    for name in sorted(names, key=_order):
        entries[f"all-{name.replace('+', '.')}"] = _entries(
            kinds, [_as_many(kind, name) for kind in kinds]
        )
    balanced = _entries(kinds, [_balanced(kind) for kind in kinds])
    if balanced:
        entries["all-balanced"] = balanced
    return {name: MigConfig(name, tuple(config)) for name, config in entries.items()}


def _entries(kinds: Sequence[GpuKind], counts: Sequence[Counter[Profile]]) -> list[Entry]:
    """Return an entry for each kind that has devices, for all GPUs if all kinds have the same."""
    if len({frozenset(each.items()) for each in counts}) == 1:
        return [Entry(None, mig_enabled=True, mig_devices=counts[0])] if counts[0] else []
    return [
        Entry(None, mig_enabled=True, mig_devices=count, filters=(kind.device_id.lower(),))
        for kind, count in zip(kinds, counts, strict=True)
        if count
    ]


def _as_many(kind: GpuKind, name: str) -> Counter[Profile]:
    """Return as many devices of the profile *name* as fit on a GPU of *kind*."""
    profile = kind.profiles.get(name)
    if profile is None:
        return Counter()
    one = RequestedInstance(name, (profile.slices,))
    count = next(n for n in range(profile.limit, -1, -1) if _fits(kind, [one] * n))
    return +Counter({mig_profiles.parse(name): count})


def _balanced(kind: GpuKind) -> Counter[Profile]:
    """Return devices of several sizes that fit on a GPU of *kind* together, if it has them."""
    total = max((profile.slices for profile in kind.profiles.values()), default=0)
    # Of the profiles with equal compute slices the one with the least memory.
    smallest: dict[int, GpuProfile] = {}
    for name in sorted(kind.profiles, key=_order):
        profile = kind.profiles[name]
        if not mig_profiles.parse(name).added:
            smallest.setdefault(profile.slices, profile)
    sizes = _BALANCED.get(total, ())
    if not all(size in smallest for size in sizes):
        return Counter()
    chosen = [smallest[size] for size in sizes]
    if not _fits(kind, [RequestedInstance(one.name, (one.slices,)) for one in chosen]):
        return Counter()
    return Counter(mig_profiles.parse(one.name) for one in chosen)


def _fits(kind: GpuKind, requested: Sequence[RequestedInstance]) -> bool:
    try:
        layouts.plan(kind.profiles, (), requested)
    except LayoutError:
        return False
    return True


def _order(name: str) -> tuple[int, int, str]:
    """Return the order of the profile *name*: small ones first."""
    profile = mig_profiles.parse(name)
    return profile.gpu_slices, profile.memory_gb, name
