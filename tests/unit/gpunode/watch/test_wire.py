# SPDX-License-Identifier: Apache-2.0
"""Frames and messages of the watcher's child: exactly what it sends, and nothing else."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.model import DriverState, Event, EventKind, GpuTelemetry, Link, Process, Topology
from gpunode.watch import framing
from gpunode.watch.wire import Answer, Changed, decode

GPU = {
    "index": 0,
    "uuid": "GPU-a",
    "minor": 0,
    "name": "H100",
    "bus_id": "0000:1a:00.0",
    "mig_enabled": True,
    "mig_devices": [],
    "architecture": "9.0",
    "coherent": False,
    "memory_node": -1,
    "brand": "nvidia",
}
MIG = {"index": 0, "uuid": "MIG-a", "gpu_instance": 7, "compute_instance": 0}
SIZE = {
    "profile": "1g.10gb",
    "start": None,
    "size": 1,
    **dict.fromkeys(("gpu_slices", "compute_slices", "memory_mib", "multiprocessors"), 1),
    **dict.fromkeys(("copy_engines", "decoders", "encoders", "jpeg_engines", "ofa_engines"), 0),
}
MODEL = {
    "driver_version": "550",
    "cuda_version": "12.4",
    "gpus": [
        {
            "gpu": GPU,
            "memory_mib": 81559,
            "numa_node": None,
            "mig_capable": True,
            "mig_pending": None,
            "mig_devices": [{"device": MIG, "attributes": SIZE}],
            "device_id": "",
            "subsystem_id": "",
            "compute_mode": "default",
            "cluster_uuid": "",
            "clique_id": None,
        }
    ],
    "links": [["GPU-a", "GPU-b", 30, 2]],
    "left_out": [],
    "inventory": None,
    "problems": ["a sentence"],
}
ANSWER = {
    "state": "ready",
    "reason": "",
    "hint": "",
    "model": MODEL,
    "energy": {"GPU-a": 5},
    "load": "550 1",
    "telemetry": [
        {
            "uuid": "GPU-a",
            "values": {"A": 1, "B": 2.5},
            "processes": [{"pid": 1, "memory_mib": None}],
        }
    ],
    "ends": False,
}  # fmt: skip
EVENT = {
    "kind": "xid",
    "uuid": "GPU-a",
    "xid": 79,
    "gpu_instance": None,
    "compute_instance": None,
    "text": "",
}


def with_value(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    """Return an answer with another value at *path*."""
    message: Any = {"answer": copy.deepcopy(ANSWER)}
    place = message["answer"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return message  # type: ignore[no-any-return]


def test_an_answer_becomes_values() -> None:
    """Tuples, enumerations and links by pair."""
    answer = decode({"answer": ANSWER}, 7.0)
    assert isinstance(answer, Answer)
    assert answer.state is DriverState.READY
    assert answer.model is not None
    assert answer.model.links == {("GPU-a", "GPU-b"): Link(Topology.HOST_BRIDGE, 2)}
    assert answer.model.gpus[0].mig_devices[0].attributes.profile == "1g.10gb"
    assert answer.model.gpus[0].gpu.uuid == "GPU-a"
    assert answer.telemetry == (GpuTelemetry("GPU-a", {"A": 1, "B": 2.5}, (Process(1, None),)),)


def test_an_event_gets_the_time_of_its_arrival() -> None:
    """The child has no clock that the parent trusts."""
    assert decode({"event": EVENT}, 7.0) == Event(EventKind.XID, 7.0, "GPU-a", 79)
    assert decode({"changed": True}, 7.0) == Changed()


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {},
        {"answer": None},
        {"answer": ANSWER, "event": EVENT},
        {"other": {}},
        {"event": {**EVENT, "more": 1}},
        {"event": {**EVENT, "kind": "party"}},
        {"event": None},
        with_value(("state",), "hanging"),
        with_value(("state",), "starting"),
        with_value(("state",), 1),
        with_value(("ends",), 1),
        with_value(("more",), 1),
        with_value(("energy",), {"GPU-a": "5"}),
        with_value(("telemetry",), {}),
        with_value(("telemetry", 0, "values", "A"), True),
        with_value(("model", "links"), {}),
        with_value(("model", "links", 0), ["GPU-a", "GPU-b", 31, 2]),
        with_value(("model", "links", 0), ["GPU-a", "GPU-b", 30]),
        with_value(("model", "gpus", 0, "gpu"), {}),
        with_value(("model", "gpus", 0, "memory_mib"), True),
        with_value(("model", "gpus", 0, "mig_devices", 0, "attributes", "start"), "0"),
        with_value(("model", "inventory"), {}),
    ],
)
def test_another_message_is_refused(message: object) -> None:
    """With a reason, and no exception of another kind."""
    with pytest.raises(framing.FrameError, match="not a message of the watcher's child"):
        decode(message, 0.0)


@given(st.lists(st.dictionaries(st.text(), st.integers())), st.integers(1, 9))
def test_frames_arrive_in_any_pieces(messages: list[dict[str, int]], size: int) -> None:
    """Each as it was sent, in order."""
    data = b"".join(map(framing.encode, messages))
    decoder = framing.Decoder()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert [message for piece in pieces for message in decoder.feed(piece)] == messages


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\0\0\0\x02{]", b"\0\0\0\x01\xff", b"\0\0\x20\0" + b"[" * 0x2000],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    """Before memory is filled with them."""
    with pytest.raises(framing.FrameError):
        framing.Decoder().feed(data)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_request_that_was_cut_off_is_refused(cut: int) -> None:
    """The end of input between two frames is the end, in a frame it is a fault."""
    reader, writer = os.pipe()
    os.write(
        writer, framing.encode({"telemetry": True}) + framing.encode({"telemetry": False})[:cut]
    )
    os.close(writer)
    try:
        assert framing.read(reader) == {"telemetry": True}
        with pytest.raises(framing.FrameError):
            framing.read(reader)
    finally:
        os.close(reader)
