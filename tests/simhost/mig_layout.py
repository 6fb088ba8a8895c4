# SPDX-License-Identifier: Apache-2.0
"""The MIG profiles of the simulated GPU, an H100 with 80 GB, and where their instances can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from artefacts import SimhostError


@dataclass(frozen=True)
class Profile:
    """A profile of GPU instances.

    *starts* are the memory slices at which an instance of *memory_slices* can begin; *number* is
    the id of the profile, *instances* are the ids of its instances.
    """

    slices: int
    memory_slices: int
    memory_mib: int
    number: int
    starts: tuple[int, ...]
    instances: range


PROFILES = {
    "1g.10gb": Profile(1, 1, 9856, 19, tuple(range(7)), range(7, 14)),
    "1g.10gb+me": Profile(1, 1, 9856, 20, tuple(range(7)), range(7, 14)),
    "1g.20gb": Profile(1, 2, 20096, 15, (0, 2, 4, 6), range(7, 14)),
    "2g.20gb": Profile(2, 2, 20096, 14, (0, 2, 4), range(3, 7)),
    "3g.40gb": Profile(3, 4, 40448, 9, (4, 0), range(1, 3)),
    "4g.40gb": Profile(4, 4, 40448, 5, (0,), range(1, 3)),
    "7g.80gb": Profile(7, 8, 81408, 0, (0,), range(1)),
}


@dataclass(frozen=True)
class Instance:
    """A GPU instance: its id, its profile, and its first memory slice."""

    number: int
    profile: Profile
    start: int


def place(names: Sequence[str]) -> list[Instance]:
    """Return an instance for each of the profiles *names*, in their order; raise SimhostError.

    The largest are placed first, each at the first of its starts that is free.
    """
    for name in names:
        if name not in PROFILES:
            raise SimhostError(f'no MIG profile "{name}"', f"there are {', '.join(PROFILES)}")
    free = set(range(8))
    slices = 7
    numbers: set[int] = set()
    placed: dict[int, Instance] = {}
    order = sorted(range(len(names)), key=lambda at: -PROFILES[names[at]].memory_slices)
    for at in order:
        profile = PROFILES[names[at]]
        width = profile.memory_slices
        fitting = [s for s in profile.starts if free >= set(range(s, s + width))]
        slices -= profile.slices
        if not fitting or slices < 0:
            raise SimhostError(f"a GPU has no room for {', '.join(names)}")
        free -= set(range(fitting[0], fitting[0] + width))
        number = next(number for number in profile.instances if number not in numbers)
        numbers.add(number)
        placed[at] = Instance(number, profile, fitting[0])
    return [placed[at] for at in range(len(names))]
