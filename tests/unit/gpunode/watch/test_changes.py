# SPDX-License-Identifier: Apache-2.0
"""The events that follow from two answers of the driver."""

from __future__ import annotations

import dataclasses

import pytest

from gpunode.model import (
    DriverState,
    EventKind,
    MigAttributes,
    NodeGpu,
    NodeMigDevice,
    NodeModel,
)
from gpunode.watch.changes import History
from gpunode.watch.wire import Answer
from gpuruntime.model import Gpu, LeftOutDevice, MigDevice

SIZE = MigAttributes(profile="1g.10gb", gpu_slices=1, compute_slices=1, memory_mib=9856)
SLICE = NodeMigDevice(MigDevice(index=0, uuid="MIG-a", gpu_instance=7, compute_instance=0), SIZE)


def gpu(index: int, *, mig: bool = False, **fields: object) -> NodeGpu:
    """Return GPU *index*."""
    value = Gpu(
        index=index,
        uuid=f"GPU-{index}",
        minor=index,
        name="H100",
        bus_id=f"0000:0{index}:00.0",
        mig_enabled=mig,
        mig_devices=(),
    )
    return NodeGpu(value, **fields)  # type: ignore[arg-type]


def model(*gpus: NodeGpu, version: str = "550", **fields: object) -> NodeModel:
    """Return a node with *gpus*."""
    return NodeModel(version, "12.4", gpus, **fields)  # type: ignore[arg-type]


def answer(content: NodeModel | None, load: str = "1", **energy: int) -> Answer:
    """Return an answer with a model, None for that of before."""
    return Answer(
        state=DriverState.READY,
        reason="",
        hint="",
        model=content,
        energy={f"GPU-{name[1:]}": value for name, value in energy.items()},
        load=load,
        telemetry=None,
        ends=False,
    )


BOTH = answer(model(gpu(0), gpu(1)), g0=100, g1=100)
FIRST = answer(model(gpu(0)))
LEFT_OUT = LeftOutDevice(name="1", reason="GPU is lost", hint="reset it")
MIG = answer(model(gpu(0, mig=True), gpu(1)))
MIG_SLICE = answer(model(gpu(0, mig=True, mig_devices=(SLICE,)), gpu(1)))


@pytest.mark.parametrize(
    ("answers", "events"),
    [
        ((BOTH,), []),
        ((BOTH, BOTH), []),
        ((FIRST, BOTH), []),
        ((BOTH, FIRST), [("lost", "GPU-1", "NVML does not list it")]),
        (
            (BOTH, answer(model(gpu(0), left_out=(LEFT_OUT,)))),
            [("lost", "GPU-1", "GPU is lost")],
        ),
        ((BOTH, FIRST, FIRST), [("lost", "GPU-1", "NVML does not list it")]),
        (
            (BOTH, FIRST, BOTH),
            [("lost", "GPU-1", "NVML does not list it"), ("back", "GPU-1", "")],
        ),
        (
            (BOTH, FIRST, BOTH, BOTH, FIRST),
            [
                ("lost", "GPU-1", "NVML does not list it"),
                ("back", "GPU-1", ""),
                ("lost", "GPU-1", "NVML does not list it"),
            ],
        ),
        ((BOTH, MIG), [("mig-changed", "GPU-0", "MIG devices: none")]),
        (
            (BOTH, MIG, MIG_SLICE, BOTH),
            [
                ("mig-changed", "GPU-0", "MIG devices: none"),
                ("mig-changed", "GPU-0", "MIG devices: 1g.10gb"),
                ("mig-changed", "GPU-0", "MIG mode is off"),
            ],
        ),
        (
            (BOTH, answer(model(gpu(0, mig_pending=True), gpu(1)))),
            [("mig-changed", "GPU-0", "MIG mode is on after the next reset")],
        ),
        (
            (BOTH, answer(None, g0=90, g1=110)),
            [("reset", "GPU-0", "the GPU counts its energy from zero again")],
        ),
        ((BOTH, answer(None, g0=150, g1=100)), []),
        (
            (BOTH, dataclasses.replace(BOTH, load="2", energy={"GPU-0": 1})),
            [("driver-changed", "", "driver 550 before, 550 now")],
        ),
        (
            (BOTH, answer(model(gpu(0), gpu(1), version="570"))),
            [("driver-changed", "", "driver 550 before, 570 now")],
        ),
    ],
)  # fmt: skip
def test_events_follow_from_the_answers(
    answers: tuple[Answer, ...], events: list[tuple[str, str, str]]
) -> None:
    """A GPU that was never there before is not back, and the same twice is no event."""
    history = History()
    seen = [event for step in answers for event in history.note(step, 5.0)]
    assert [(event.kind.value, event.uuid, event.text) for event in seen] == events
    assert all(event.time == 5.0 for event in seen)
    assert {event.kind for event in seen} <= set(EventKind)
