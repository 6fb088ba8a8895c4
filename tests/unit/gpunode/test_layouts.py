# SPDX-License-Identifier: Apache-2.0
"""Plans that change the MIG layout of a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode import layouts
from gpunode.layouts import (
    ComputeInstance,
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstance,
    DestroyGpuInstance,
    GpuInstance,
    GpuProfile,
    LayoutError,
    RequestedInstance,
)

# The placements of an A100 with 40 GB, and those of an A30: kubernetes.md, 5.2.
A100 = {
    one.name: one
    for one in (
        GpuProfile("1g.5gb", 1, 1, (0, 1, 2, 3, 4, 5, 6), 7),
        GpuProfile("1g.5gb+me", 1, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        GpuProfile("1g.10gb", 1, 2, (0, 2, 4, 6), 4),
        GpuProfile("2g.10gb", 2, 2, (0, 2, 4), 3),
        GpuProfile("3g.20gb", 3, 4, (0, 4), 2),
        GpuProfile("4g.20gb", 4, 4, (0,), 1),
        GpuProfile("7g.40gb", 7, 8, (0,), 1),
    )
}
A30 = {
    one.name: one
    for one in (
        GpuProfile("1g.6gb", 1, 1, (0, 1, 2, 3), 4),
        GpuProfile("2g.12gb", 2, 2, (0, 2), 2),
        GpuProfile("4g.24gb", 4, 4, (0,), 1),
    )
}


def requested(*names: str) -> list[RequestedInstance]:
    """Return instances with one compute instance of all slices; `1c+1c.3g.20gb` has two of one."""
    instances = []
    for name in names:
        parts = name.split(".", 1)
        if "c" in parts[0]:
            sizes = tuple(int(part.rstrip("c")) for part in parts[0].split("+"))
            instances.append(RequestedInstance(parts[1], sizes))
        else:
            instances.append(RequestedInstance(name, (int(name[0]),)))
    return instances


def instance(
    number: int, profile: str, start: int, *, busy: bool = False, slices: tuple[int, ...] = ()
) -> GpuInstance:
    """Return a present instance; if it is *busy*, its first compute instance is in use."""
    parts = tuple(
        ComputeInstance(index, size, ("pod default/train",) if busy and not index else ())
        for index, size in enumerate(slices or (int(profile[0]),))
    )
    size = {**A100, **A30}[profile].size
    return GpuInstance(number, profile, start, size, parts)


def apply(present: list[GpuInstance], plan: layouts.Plan) -> list[RequestedInstance]:
    """Return the layout after *plan*; every step is checked as a driver would."""
    gpu = {one.id: (one, {part.id: part for part in one.compute_instances}) for one in present}
    new: list[tuple[RequestedInstance, range]] = []
    for step in plan.steps:
        if isinstance(step, DestroyComputeInstance):
            assert not gpu[step.gpu_instance][1].pop(step.id).holders
        elif isinstance(step, DestroyGpuInstance):
            assert not gpu.pop(step.id)[1], "the instance has compute instances"
        elif isinstance(step, CreateGpuInstance):
            profile = {**A100, **A30}[step.profile]
            assert step.start in profile.starts
            slices = range(step.start, step.start + profile.size)
            for taken in [range(o.start, o.start + o.size) for o, _ in gpu.values()]:
                assert not set(taken) & set(slices)
            assert not any(set(other) & set(slices) for _, other in new)
            new.append((RequestedInstance(step.profile, step.compute_slices), slices))
        else:
            assert isinstance(step, CreateComputeInstance)
            parts = gpu[step.gpu_instance][1]
            number = max(parts, default=-1) + 1
            parts[number] = ComputeInstance(number, step.slices)
    stay = [
        RequestedInstance(one.profile, tuple(part.slices for part in parts.values()))
        for one, parts in gpu.values()
    ]
    return [*stay, *(one for one, _ in new)]


def multiset(instances: list[RequestedInstance]) -> Counter[tuple[str, tuple[int, ...]]]:
    """Return *instances* without their order."""
    return Counter((one.profile, tuple(sorted(one.compute_slices))) for one in instances)


@pytest.mark.parametrize(
    ("present", "names", "steps"),
    [
        ([], ["1g.5gb"] * 7, 7),
        # Created in this order, no start would be left for the 3g.
        ([], ["1g.5gb", "1g.5gb", "3g.20gb"], 3),
        ([], ["1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"], 4),
        ([], ["1c+1c+1c.3g.20gb", "4g.20gb"], 2),
        # What is equal stays.
        ([instance(1, "3g.20gb", 4, busy=True)], ["3g.20gb", "2g.10gb", "1g.5gb"], 2),
        ([instance(1, "1g.5gb", 6), instance(2, "1g.5gb", 0)], ["1g.5gb"], 2),
        ([instance(1, "7g.40gb", 0)], [], 2),
        ([instance(1, "7g.40gb", 0)], ["7g.40gb"], 0),
        # An idle instance in the way is made again elsewhere.
        ([instance(1, "1g.5gb", 0)], ["1g.5gb", "4g.20gb"], 4),
        # Of two equal instances the one in use stays.
        ([instance(1, "2g.10gb", 0), instance(2, "2g.10gb", 2, busy=True)], ["2g.10gb"], 2),
        # Only compute instances change.
        ([instance(1, "3g.20gb", 0, slices=(3,))], ["1c+1c+1c.3g.20gb"], 4),
        ([instance(1, "3g.20gb", 0, busy=True, slices=(1, 2))], ["1c+1c.3g.20gb"], 2),
    ],
)
def test_a_plan_is_legal_and_the_smallest(
    present: list[GpuInstance], names: list[str], steps: int
) -> None:
    """The driver's rules are checked at each step."""
    plan = layouts.plan(A100, present, requested(*names))
    assert multiset(apply(present, plan)) == multiset(requested(*names))
    assert len(plan.steps) == steps


@pytest.mark.parametrize(
    ("present", "names", "message", "hint"),
    [
        ([], ["1g.6gb"], "no profile 1g.6gb", "1g.10gb"),
        ([], ["3g.20gb"] * 3, "3 x 3g.20gb do not fit", "fit together: 2 x 3g.20gb"),
        ([], ["1g.5gb+me"] * 2, "do not fit", "1 x 1g.5gb+me"),
        ([], ["2c+2c.3g.20gb"], "of 4 slices do not fit in the profile 3g.20gb", "at most 3"),
        (
            [instance(1, "3g.20gb", 0, busy=True)],
            ["4g.20gb"],
            "3g.20gb at slice 0 by pod default/train",
            "apply the layout again",
        ),
        ([instance(1, "1g.5gb", 2, busy=True)], ["1g.5gb", "4g.20gb"], "in use", "end what uses"),
        ([instance(1, "3g.20gb", 0, busy=True)], ["1c+1c+1c.3g.20gb"], "in use", "end what uses"),
    ],
)
def test_a_layout_that_cannot_be_made_is_refused(
    present: list[GpuInstance], names: list[str], message: str, hint: str
) -> None:
    """Before any step; the message names what is in the way."""
    with pytest.raises(LayoutError) as error:
        layouts.plan(A100, present, requested(*names))
    assert message in error.value.message
    assert hint in (error.value.hint or "")


@given(st.data(), st.sampled_from([A100, A30]))
@settings(deadline=None, max_examples=150)
def test_any_layout_changes_to_any_other(
    data: st.DataObject, profiles: dict[str, GpuProfile]
) -> None:
    """If a plan exists; none touches what is in use, and all end in the requested layout."""
    names = st.lists(st.sampled_from(sorted(profiles)), max_size=7)
    present: list[GpuInstance] = []
    try:
        first = layouts.plan(profiles, [], requested(*data.draw(names)))
        target = requested(*data.draw(names))
        for number, step in enumerate(first.steps):
            assert isinstance(step, CreateGpuInstance)
            busy = data.draw(st.booleans())
            present.append(instance(number, step.profile, step.start, busy=busy))
        plan = layouts.plan(profiles, present, target)
    except LayoutError:
        return
    assert multiset(apply(present, plan)) == multiset(target)
