# SPDX-License-Identifier: Apache-2.0
"""The health of devices over virtual time."""

from __future__ import annotations

import dataclasses

import pytest
from nodes import gpu, mig_uuid, model, uuid

from gpunode import health
from gpunode.devices import Device, device_of
from gpunode.health import HealthPolicy, HealthState
from gpunode.model import DriverState, DriverStatus, Event, EventKind, NodeModel, Update

NODE = model(gpu(0), gpu(1), gpu(2, mig=["1g.5gb", "1g.5gb"]))
READY = DriverStatus(DriverState.READY, 0.0)
ONE, OTHER = device_of(NODE.gpus[0]), device_of(NODE.gpus[1])
SLICES = [device_of(NODE.gpus[2], mig) for mig in NODE.gpus[2].mig_devices]
ALL = [ONE, OTHER, *SLICES]


class Run:
    """A state machine that is fed updates at virtual times."""

    def __init__(self, **variables: str) -> None:
        self.policy = health.policy(variables)
        self.state = HealthState()
        self.node = NODE
        self.at(0)

    def at(
        self,
        now: float,
        *events: Event,
        node: NodeModel | None = None,
        state: DriverState = DriverState.READY,
        reason: str = "",
    ) -> list[Device]:
        """Feed an update at the time *now*; return the devices that are unhealthy then."""
        self.node = node or self.node
        status = DriverStatus(state, 0.0, reason)
        events = tuple(dataclasses.replace(event, time=now) for event in events)
        self.state = health.advance(
            self.state, Update(status, self.node, events), now, self.policy
        )
        return [device for device in ALL if self.state.reason(device)]


def _event(kind: EventKind, index: int = 0) -> Event:
    return Event(kind, 0, uuid(index))


def _xid(
    xid: int, index: int = 0, instance: int | None = None, compute: int | None = None
) -> Event:
    return Event(EventKind.XID, 0, uuid(index), xid, instance, compute)


def test_a_gpu_recovers_after_quiet_time() -> None:
    """Reports 189, 1014 and 111 of the device plugin: unhealthy until the plugin is restarted."""
    run = Run()
    assert run.at(10, _xid(62)) == [ONE]
    assert run.state.reason(ONE) == "XID 62 (internal microcontroller halt)"
    assert run.state.next_change() == 610
    assert run.at(609.9) == [ONE]
    assert run.at(610) == []
    assert run.state.next_change() is None


def test_each_further_fault_renews_the_quiet_time() -> None:
    """A GPU that fails every nine minutes is not healthy in between."""
    run = Run()
    run.at(10, _xid(62))
    run.at(500, _xid(94))
    assert run.at(610) == [ONE]
    assert run.at(1100) == []


@pytest.mark.parametrize("xid", [48, 63, 64, 74, 79, 95, 119, 120])
def test_some_xids_need_a_reset(xid: int) -> None:
    """No time heals them: a reset of the GPU does, or another start of the driver."""
    run = Run()
    run.at(10, _xid(xid))
    # A milder fault later does not weaken it.
    assert run.at(20, _xid(62)) == [ONE]
    assert run.state.next_change() is None
    assert run.at(10**6) == [ONE]
    assert f"XID {xid} " in run.state.reason(ONE)
    assert run.at(10**6 + 1, _event(EventKind.RESET, 1)) == [ONE]
    assert run.at(10**6 + 2, _event(EventKind.RESET)) == []


def test_a_driver_that_was_loaded_again_has_reset_the_gpus() -> None:
    """As after an update of the driver."""
    run = Run()
    run.at(10, _xid(79), _xid(79, 1))
    assert run.at(20, Event(EventKind.DRIVER_CHANGED, 0)) == []


def test_every_slice_of_a_sick_gpu_is_unhealthy() -> None:
    """Report 2200 of HAMi: only one slice of a sick GPU went away."""
    assert Run().at(1, _xid(48, 2)) == SLICES


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (_xid(62, 2, instance=1), SLICES[:1]),
        (_xid(62, 2, instance=2, compute=0), SLICES[1:]),
        (_xid(62, 2, instance=2, compute=1), []),
        (_xid(62, 2, instance=0xFFFFFFFF, compute=0xFFFFFFFF), SLICES),
        (Event(EventKind.XID, 0, mig_uuid(2, 1), 62), SLICES[1:]),
    ],
)
def test_an_event_of_an_instance_is_of_its_slice_only(
    event: Event, expected: list[Device]
) -> None:
    """MIG isolates faults: the other slices go on."""
    assert Run().at(1, event) == expected


def test_a_fault_of_an_instance_is_one_of_the_whole_gpu() -> None:
    """With the strategy none, a GPU in MIG mode is offered whole."""
    run = Run()
    run.at(1, _xid(62, 2, instance=1))
    assert run.state.reason(device_of(NODE.gpus[2]))


def test_new_mig_devices_have_no_old_faults() -> None:
    """The number of an instance is used again; a fault of the whole GPU stays."""
    run = Run()
    run.at(1, _xid(62, 2, instance=1))
    assert run.at(2, _event(EventKind.MIG_CHANGED, 2)) == []
    run.at(3, _xid(62, 2))
    assert run.at(4, _event(EventKind.MIG_CHANGED, 2)) == SLICES


@pytest.mark.parametrize(
    ("disable", "enable", "acting"),
    [
        ("", "", {94, 48}),
        ("31,94", "", {48}),
        ("31,94", "94", {94, 48}),
        ("all", "", set()),
        ("xids", "", set()),
        ("ALL", "48", {48}),
        ("all", "all", {13, 31, 43, 45, 68, 109, 94, 48}),
        ("", "31, 13", {13, 31, 94, 48}),
    ],
)
def test_which_xids_act(disable: str, enable: str, acting: set[int]) -> None:
    """Reports 234 and 129 of the device plugin: faults of applications removed GPUs."""
    run = Run(DP_DISABLE_HEALTHCHECKS=disable, DP_ENABLE_HEALTHCHECKS=enable)
    xids = (13, 31, 43, 45, 68, 109, 94, 48)
    assert {xid for xid in xids if _after_xid(run, xid)} == acting


def _after_xid(run: Run, xid: int) -> list[Device]:
    """Return what is unhealthy after *xid* on a machine without faults."""
    run.state = dataclasses.replace(run.state, faults={})
    return run.at(1, _xid(xid))


def test_words_that_are_not_xids_are_named() -> None:
    """A typing error must not switch checks off silently."""
    policy = health.policy({"DP_DISABLE_HEALTHCHECKS": "13,al", "DP_ENABLE_HEALTHCHECKS": "xids"})
    assert policy.problems == (
        'DP_DISABLE_HEALTHCHECKS has "al", which is not an XID',
        'DP_ENABLE_HEALTHCHECKS has "xids", which is not an XID',
    )
    assert policy.disabled == {13}


def test_a_card_without_events_is_healthy() -> None:
    """Pull request 1562 of the device plugin: an old card without event support was unhealthy."""
    assert Run().at(1, _event(EventKind.EVENTS_UNSUPPORTED)) == []


def test_a_card_whose_events_cannot_be_requested_is_unhealthy() -> None:
    """That card alone, until it has been quiet."""
    run = Run()
    assert run.at(1, _event(EventKind.EVENTS_FAILED)) == [ONE]
    assert run.at(601) == []


def test_a_failed_wait_concerns_all_devices_for_a_moment() -> None:
    """XIDs may have been missed."""
    run = Run()
    assert run.at(1, Event(EventKind.WAIT_FAILED, 0)) == ALL
    assert run.at(31) == []


def test_checks_that_are_off() -> None:
    """The variable switches off all of them."""
    run = Run(DP_DISABLE_HEALTHCHECKS="all")
    events = Event(EventKind.WAIT_FAILED, 0), _event(EventKind.EVENTS_FAILED)
    assert run.at(1, *events) == []


def test_an_event_of_an_unknown_gpu_affects_no_other() -> None:
    """The incumbent takes it for a fault of all GPUs."""
    assert Run().at(1, _xid(79, 7), Event(EventKind.XID, 0, "", 79)) == []


def test_a_gpu_that_is_lost_and_comes_back() -> None:
    """It is unhealthy while it is away, and until it has been quiet afterwards."""
    run = Run()
    rest = model(*NODE.gpus[1:])
    assert run.at(10, _event(EventKind.LOST), node=rest) == [ONE]
    assert run.state.reason(ONE) == "the GPU does not answer"
    assert run.at(10_000) == [ONE]
    assert run.at(10_001, _event(EventKind.BACK), node=NODE) == [ONE]
    assert run.at(10_600) == [ONE]
    assert run.at(10_601) == []


def test_a_lost_gpu_with_its_xid_needs_a_reset() -> None:
    """XID 79, then the GPU is gone; it is back only after a reset."""
    run = Run()
    rest = model(*NODE.gpus[1:])
    run.at(10, _xid(79))
    run.at(11, _event(EventKind.LOST), node=rest)
    run.at(100, _event(EventKind.BACK), node=NODE)
    assert run.at(10_000) == [ONE]
    assert run.at(10_001, _event(EventKind.RESET)) == []


@pytest.mark.parametrize(
    "state",
    [DriverState.ABSENT, DriverState.MISMATCHED, DriverState.FAILED, DriverState.HANGING],
)
def test_a_driver_that_does_not_answer(state: DriverState) -> None:
    """No container could start; once it answers, all is as before, without quiet time."""
    run = Run()
    run.at(5, _xid(79, 1))
    assert run.at(10, state=state, reason="why") == ALL
    assert run.state.reason(ONE) == f"the driver is {state.value}: why"
    # The child was started again, and has not answered yet.
    assert run.at(11, state=DriverState.STARTING) == ALL
    assert run.at(12) == [OTHER]


def test_the_start_of_the_watcher_is_not_a_fault() -> None:
    """Devices of the last model stay as they were."""
    run = Run()
    assert run.at(1, state=DriverState.STARTING) == []


def test_no_fault_ends_while_the_driver_does_not_answer() -> None:
    """Nor is there a time at which it would: nobody may wait for a time that has passed."""
    run = Run()
    run.at(1, _xid(62))
    assert run.at(700, state=DriverState.STARTING) == [ONE]
    assert run.state.next_change() is None
    run.at(701, state=DriverState.HANGING)
    assert run.state.next_change() is None
    assert run.at(702) == []


def test_the_quiet_time_is_a_setting() -> None:
    """As short as one likes."""
    run = Run()
    run.policy = HealthPolicy(quiet_s=5)
    run.at(1, _xid(62))
    assert run.at(6) == []
