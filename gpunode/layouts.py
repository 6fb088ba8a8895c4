# SPDX-License-Identifier: Apache-2.0
"""Plan the change of a GPU's MIG layout: which instances stay, are destroyed, and are created.

Pure. The possible placements are those that NVML reports for the GPU: no table of models decides.
The plan is the smallest: an instance that the requested layout contains stays where it is, and an
instance in use is never part of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from gpuruntime.errors import RequestError


class LayoutError(RequestError):
    """The requested layout cannot be made on this GPU."""


class PlaceInUseError(LayoutError):
    """The requested layout needs the place of instances in use."""


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """A profile of GPU instances: its name without the compute part, `3g.20gb` or `1g.5gb+me`.

    *starts* are the memory slices at which an instance can begin, and *size* is the number of
    slices that it takes. *slices* is its number of compute slices. *limit* is the greatest number
    of instances on one GPU.
    """

    name: str
    slices: int
    size: int
    starts: tuple[int, ...]
    limit: int


@dataclass(frozen=True, slots=True)
class ComputeInstance:
    """A compute instance: its id in its GPU instance, its compute slices, and what uses it.

    *holders* are processes or pods, in words; empty if the instance is idle.
    """

    id: int
    slices: int
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A GPU instance of the present layout, on *size* memory slices from *start*."""

    id: int
    profile: str
    start: int
    size: int
    compute_instances: tuple[ComputeInstance, ...] = ()

    @property
    def holders(self) -> tuple[str, ...]:
        """What uses the instance: the holders of its compute instances."""
        return tuple(chain.from_iterable(one.holders for one in self.compute_instances))


@dataclass(frozen=True, slots=True)
class RequestedInstance:
    """A GPU instance of the requested layout, with the slices of each of its compute instances."""

    profile: str
    compute_slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DestroyComputeInstance:
    """Destroy the compute instance *id* of the GPU instance *gpu_instance*."""

    gpu_instance: int
    id: int
    slices: int


@dataclass(frozen=True, slots=True)
class DestroyGpuInstance:
    """Destroy a GPU instance that has no compute instance any more."""

    id: int
    profile: str
    start: int


@dataclass(frozen=True, slots=True)
class CreateGpuInstance:
    """Create a GPU instance at *start*, then its compute instances."""

    profile: str
    start: int
    compute_slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CreateComputeInstance:
    """Create a compute instance in the GPU instance *gpu_instance* that stays."""

    gpu_instance: int
    slices: int


Step = DestroyComputeInstance | DestroyGpuInstance | CreateGpuInstance | CreateComputeInstance


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from the present layout to the requested one, in order.

    *staying* are the ids of the GPU instances that no step destroys.
    """

    steps: tuple[Step, ...] = ()
    staying: tuple[int, ...] = field(default=())


def plan(
    profiles: Mapping[str, GpuProfile],
    present: Sequence[GpuInstance],
    requested: Sequence[RequestedInstance],
) -> Plan:
    """Return the smallest plan that changes the layout *present* to *requested*.

    *profiles* are those of the GPU, by name. Raises LayoutError if the GPU lacks a profile, if the
    instances do not fit, or if an instance in use would have to be destroyed.
    """
    _check_profiles(profiles, requested)
    if not _fits_empty(profiles, requested):
        raise LayoutError(
            f"the instances {describe(requested)} do not fit on the GPU together",
            f"use fewer instances; these fit together: {_largest_part(profiles, requested)}",
        )
    best: Plan | None = None
    for matches in _matches(present, requested):
        steps = _steps(profiles, present, requested, matches)
        if steps is not None and (best is None or _cost(steps) < _cost(best.steps)):
            best = Plan(steps, tuple(present[index].id for index in matches))
    if best is None:
        busy = [instance for instance in present if instance.holders]
        raise PlaceInUseError(
            f"the layout {describe(requested)} needs the place of instances in use: "
            f"{_in_use(busy)}",
            "end what uses them, then apply the layout again",
        )
    return best


def nearest(profiles: Mapping[str, GpuProfile], name: str) -> str:
    """Return the profile whose number of compute slices and name are nearest to *name*."""
    slices = int(name.partition("g")[0]) if name.partition("g")[0].isdigit() else 0
    return min(profiles.values(), key=lambda one: (abs(one.slices - slices), one.name)).name


def describe(requested: Sequence[RequestedInstance]) -> str:
    """Return *requested* in words: `2 x 1g.5gb, 1 x 3g.20gb`."""
    counts = Counter(instance.profile for instance in requested)
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))


def _check_profiles(
    profiles: Mapping[str, GpuProfile], requested: Sequence[RequestedInstance]
) -> None:
    for instance in requested:
        if instance.profile not in profiles:
            hint = (
                f"the nearest profile of this GPU is {nearest(profiles, instance.profile)}"
                if profiles
                else "use a GPU that supports MIG"
            )
            raise LayoutError(f"the GPU has no profile {instance.profile}", hint)
        if sum(instance.compute_slices) > profiles[instance.profile].slices:
            raise LayoutError(
                f"compute instances of {sum(instance.compute_slices)} slices do not fit in the "
                f"profile {instance.profile}",
                f"use at most {profiles[instance.profile].slices} slices",
            )


def _matches(
    present: Sequence[GpuInstance], requested: Sequence[RequestedInstance]
) -> Iterator[dict[int, int]]:
    """Yield each way to let instances stay: index in *present* → index in *requested*.

    Wanted instances that are equal are used in order, so that no way comes twice.
    """

    def assign(index: int, matches: dict[int, int]) -> Iterator[dict[int, int]]:
        if index == len(present):
            yield dict(matches)
            return
        instance, tried = present[index], set()
        for position, target in enumerate(requested):
            if position in matches.values() or target in tried:
                continue
            if target.profile == instance.profile and _can_become(instance, target):
                tried.add(target)
                matches[index] = position
                yield from assign(index + 1, matches)
                del matches[index]
        if not instance.holders:
            yield from assign(index + 1, matches)

    return assign(0, {})


def _can_become(instance: GpuInstance, target: RequestedInstance) -> bool:
    """Return whether *target* has all compute instances of *instance* that are in use."""
    busy = Counter(one.slices for one in instance.compute_instances if one.holders)
    return not busy - Counter(target.compute_slices)


def _steps(
    profiles: Mapping[str, GpuProfile],
    present: Sequence[GpuInstance],
    requested: Sequence[RequestedInstance],
    matches: Mapping[int, int],
) -> tuple[Step, ...] | None:
    """Return the steps if the instances in *matches* stay, None if the others then do not fit."""
    staying = [present[index] for index in matches]
    taken = 0
    for instance in staying:
        taken |= _mask(instance.size, instance.start)
    new = [one for position, one in enumerate(requested) if position not in matches.values()]
    starts = _place(profiles, new, taken)
    if starts is None:
        return None
    destroyed: list[Step] = []
    created: list[Step] = []
    for index, instance in enumerate(present):
        if index in matches:
            removed, added = _compute_changes(instance, requested[matches[index]])
            destroyed += removed
            created += added
            continue
        destroyed += (
            DestroyComputeInstance(instance.id, one.id, one.slices)
            for one in instance.compute_instances
        )
        destroyed.append(DestroyGpuInstance(instance.id, instance.profile, instance.start))
    placed = sorted(zip(starts, new), key=lambda pair: pair[0])
    instances = [CreateGpuInstance(one.profile, at, one.compute_slices) for at, one in placed]
    return (*destroyed, *instances, *created)


def _compute_changes(
    instance: GpuInstance, target: RequestedInstance
) -> tuple[list[Step], list[Step]]:
    """Return the compute instances to destroy and to create in an instance that stays."""
    missing = Counter(target.compute_slices)
    removed: list[Step] = []
    # Those in use come first, so that an idle one of the same size is destroyed instead.
    for one in sorted(instance.compute_instances, key=lambda each: not each.holders):
        if missing[one.slices]:
            missing[one.slices] -= 1
        else:
            removed.append(DestroyComputeInstance(instance.id, one.id, one.slices))
    added = [CreateComputeInstance(instance.id, size) for size in sorted(missing.elements())]
    return removed, [*reversed(added)]


def _cost(steps: Sequence[Step]) -> tuple[int, int]:
    """Return what a plan is compared by: GPU instances destroyed, then all steps."""
    return sum(isinstance(step, DestroyGpuInstance) for step in steps), len(steps)


def _fits_empty(
    profiles: Mapping[str, GpuProfile], requested: Sequence[RequestedInstance]
) -> bool:
    return _place(profiles, requested, 0) is not None


def _place(
    profiles: Mapping[str, GpuProfile], new: Sequence[RequestedInstance], taken: int
) -> list[int] | None:
    """Return a start for each of *new* beside the slices of the mask *taken*, None without one.

    Large instances are placed first, because they have the fewest starts.
    """
    limits = Counter(instance.profile for instance in new)
    if any(count > profiles[name].limit for name, count in limits.items()):
        return None
    order = sorted(
        range(len(new)),
        key=lambda index: (-profiles[new[index].profile].size, new[index].profile, index),
    )
    starts = [-1] * len(new)

    def place(position: int, mask: int) -> bool:
        if position == len(order):
            return True
        index = order[position]
        profile = profiles[new[index].profile]
        # Equal instances are interchangeable: they are tried in one order only.
        before = new[order[position - 1]].profile if position else ""
        least = starts[order[position - 1]] + 1 if before == profile.name else 0
        for start in profile.starts:
            slices = _mask(profile.size, start)
            if start >= least and not mask & slices:
                starts[index] = start
                if place(position + 1, mask | slices):
                    return True
        return False

    return starts if place(0, taken) else None


def _mask(size: int, start: int) -> int:
    return ((1 << size) - 1) << start


def _largest_part(
    profiles: Mapping[str, GpuProfile], requested: Sequence[RequestedInstance]
) -> str:
    """Return in words the instances of *requested*, in order, that fit together."""
    part: list[RequestedInstance] = []
    for instance in requested:
        if _fits_empty(profiles, [*part, instance]):
            part.append(instance)
    return describe(part)


def _in_use(instances: Sequence[GpuInstance]) -> str:
    return "; ".join(
        f"{one.profile} at slice {one.start} by {', '.join(one.holders)}" for one in instances
    )
