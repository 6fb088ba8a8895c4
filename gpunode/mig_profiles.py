# SPDX-License-Identifier: Apache-2.0
"""The names of MIG profiles, such as `1g.5gb`, `1c.3g.20gb` and `1g.5gb+me`.

`[Cc.]Gg.MEMORYgb[+ATTRIBUTE,...][-ATTRIBUTE,...]`: C compute slices of the G slices of a GPU
instance, which is left out if it equals G, and the memory of the instance. Attributes say which
media engines the instance has, or that it can do graphics.
"""

from __future__ import annotations

import math
import re

from gpuruntime.record import Record

ATTRIBUTES = ("gfx", "me", "me.all")
_NAME = re.compile(
    r"(?:(?P<compute>[1-9][0-9]?)c\.)?(?P<gpu>[1-9][0-9]?)g\.(?P<memory>[1-9][0-9]{0,4})gb"
    r"(?:\+(?P<added>[a-z.,]+))?(?:-(?P<removed>[a-z.,]+))?\Z",
    re.ASCII,
)
# A GPU has at most this many memory slices: its instances get memory in such parts.
_MEMORY_SLICES = 8
# A whole slice is 79 GB or 80 GB by the way the driver reserves memory.
_TOLERANCE_GB = 1


class Profile(Record):
    """A MIG profile. *added* and *removed* are sorted attributes."""

    # Not a dataclass: the child of the watcher imports this module, and has to be small.
    __slots__ = ("added", "compute_slices", "gpu_slices", "memory_gb", "removed")

    def __init__(
        self,
        *,
        compute_slices: int,
        gpu_slices: int,
        memory_gb: int,
        added: tuple[str, ...] = (),
        removed: tuple[str, ...] = (),
    ) -> None:
        self.compute_slices = compute_slices
        self.gpu_slices = gpu_slices
        self.memory_gb = memory_gb
        self.added = added
        self.removed = removed

    def __str__(self) -> str:
        compute = "" if self.compute_slices == self.gpu_slices else f"{self.compute_slices}c."
        added = f"+{','.join(self.added)}" if self.added else ""
        removed = f"-{','.join(self.removed)}" if self.removed else ""
        return f"{compute}{self.gpu_slices}g.{self.memory_gb}gb{added}{removed}"

    def is_same(self, other: Profile) -> bool:
        """Return whether *other* is this profile, on a driver that may count memory otherwise."""
        return abs(self.memory_gb - other.memory_gb) <= _TOLERANCE_GB and (
            (self.compute_slices, self.gpu_slices, self.added, self.removed)
            == (other.compute_slices, other.gpu_slices, other.added, other.removed)
        )


def parse(name: str) -> Profile:
    """Return the profile *name*; raise ValueError, with the reason, if it is not a name of one."""
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f'"{name}" is not a MIG profile such as 1g.5gb or 1c.3g.20gb+me')
    gpu_slices = int(match["gpu"])
    compute_slices = int(match["compute"] or gpu_slices)
    if compute_slices > gpu_slices:
        raise ValueError(f'MIG profile "{name}" has more compute slices than GPU slices')
    added = _attributes(name, match["added"])
    removed = _attributes(name, match["removed"])
    if set(added) & set(removed):
        raise ValueError(f'MIG profile "{name}" has an attribute with "+" and with "-"')
    return Profile(
        compute_slices=compute_slices,
        gpu_slices=gpu_slices,
        memory_gb=int(match["memory"]),
        added=added,
        removed=removed,
    )


def of_sizes(
    *,
    compute_slices: int,
    gpu_slices: int,
    memory_mib: int,
    gpu_memory_mib: int,
    added: tuple[str, ...] = (),
    removed: tuple[str, ...] = (),
) -> Profile:
    """Return the profile of a MIG device with *memory_mib* on a GPU of *gpu_memory_mib*.

    The memory is rounded up to slices of the GPU's memory. Raises ValueError for a GPU without
    memory.
    """
    if gpu_memory_mib <= 0:
        raise ValueError(f"a GPU with {gpu_memory_mib} MiB of memory has no MIG profiles")
    slices = math.ceil(_MEMORY_SLICES * memory_mib / gpu_memory_mib)
    total_gb = math.ceil(gpu_memory_mib / 1024)
    # Halves are rounded up.
    memory_gb = math.floor(slices * total_gb / _MEMORY_SLICES + 0.5)
    return Profile(
        compute_slices=compute_slices,
        gpu_slices=gpu_slices,
        memory_gb=memory_gb,
        added=added,
        removed=removed,
    )


def _attributes(name: str, text: str | None) -> tuple[str, ...]:
    attributes = text.split(",") if text else []
    for attribute in attributes:
        if attribute not in ATTRIBUTES:
            raise ValueError(
                f'MIG profile "{name}" has the attribute "{attribute}"; '
                f"there are {', '.join(ATTRIBUTES)}"
            )
    if len(set(attributes)) != len(attributes):
        raise ValueError(f'MIG profile "{name}" has an attribute twice')
    return tuple(sorted(attributes))
