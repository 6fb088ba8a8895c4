# SPDX-License-Identifier: Apache-2.0
"""The watcher with a real child over the fake NVML: what it reports, and how it recovers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from node.node_host import QUICK, VERSION, NodeHost, bus_id, mig_uuid, uuid

from gpunode.model import DriverState, Event, EventKind, Link, Topology, Update
from gpunode.watch.watcher import Watcher

PATIENCE_S = 20


class Observer:
    """A consumer of a watcher that remembers all updates."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.updates: list[Update] = []
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        async for update in self.watcher.updates():
            self.updates.append(update)

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return [event for update in self.updates for event in update.events]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until *condition* holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 (a condition of a test has no event)
                await asyncio.sleep(0.01)

    async def until_state(self, state: DriverState) -> None:
        """Wait until the driver is in *state*, which an update has told."""
        await self.until(lambda: self.updates and self.updates[-1].status.state is state)

    async def until_event(self, kind: EventKind) -> Event:
        """Wait for the first event of *kind*, and return it."""
        await self.until(lambda: any(event.kind is kind for event in self.events))
        return next(event for event in self.events if event.kind is kind)


def watch(
    host: NodeHost,
    scenario: Callable[[Observer], Awaitable[None]],
    settings: object = QUICK,
) -> Observer:
    """Play *scenario* with an observer of *host*, and return the observer."""

    async def play() -> Observer:
        async with host.watcher(settings) as watcher:  # type: ignore[arg-type]
            observer = Observer(watcher)
            await scenario(observer)
        await observer._task
        return observer

    return asyncio.run(play())


async def ready(observer: Observer) -> None:
    """Wait until the driver is ready."""
    await observer.until_state(DriverState.READY)


def test_a_node_is_described_whole(tmp_path: Path) -> None:
    """GPUs with NUMA, PCI ids, fabric and compute mode; MIG devices with sizes; links."""
    host = NodeHost(tmp_path, 4, migs=[1])
    host.allow_mig("gpu1/gi1/ci0", "gpu1/gi9/ci0", "gpu1/gi11/ci0")
    host.say(
        f"mig 1 0 {mig_uuid(1, 0)} 1 0 3 3 40448",
        f"mig 1 1 {mig_uuid(1, 1)} 9 0 2 1 19968",
        f"mig 1 2 {mig_uuid(1, 2)} 11 0 1 1 9856",
        "miginstance 1 0 4 4 9",
        "migengines 1 0 60 3 3 1 1 0",
        "miginstance 1 2 3 1 20",
        "migpending 2 1",
        "pci 0 20b010de 134f10de",
        "fabric 0 00112233-4455-6677-8899-aabbccddeeff 7",
        "computemode 0 3",
        *("nvlink 0 1 4", "nvlink 1 0 4"),
        *("topology 0 1 10", "topology 0 2 30"),
        *("nvswitch 2 18", "nvswitch 3 18"),
    )
    model = watch(host, ready).watcher.current.model
    assert model is not None
    assert (model.driver_version, model.cuda_version) == (VERSION, "12.4")
    first, second, third, _ = model.gpus
    assert [gpu.gpu.bus_id for gpu in model.gpus] == [bus_id(gpu) for gpu in range(4)]
    assert [gpu.numa_node for gpu in model.gpus] == [0, 0, 1, 1]
    assert first.memory_mib == 81559
    assert (first.device_id, first.subsystem_id) == ("0x20B010DE", "0x134F10DE")
    assert (first.compute_mode, second.compute_mode) == ("exclusive-process", "default")
    assert first.cluster_uuid == "00112233-4455-6677-8899-aabbccddeeff"
    assert (first.clique_id, second.clique_id) == (7, None)
    assert (first.mig_capable, first.mig_pending, third.mig_pending) == (True, None, True)
    sizes = [mig.attributes for mig in second.mig_devices]
    assert [size.profile for size in sizes] == ["3g.40gb", "1c.2g.20gb", "1g.10gb+me"]
    assert (sizes[0].start, sizes[0].size) == (4, 4)
    assert (sizes[0].multiprocessors, sizes[0].copy_engines, sizes[0].encoders) == (60, 3, 1)
    assert [mig.device.uuid for mig in second.mig_devices] == [mig_uuid(1, i) for i in range(3)]
    assert model.links[uuid(0), uuid(1)] == Link(Topology.SWITCH, 4)
    assert model.links[uuid(2), uuid(0)] == Link(Topology.HOST_BRIDGE, 0)
    assert model.links[uuid(2), uuid(3)] == Link(Topology.SYSTEM, 18)
    assert len(model.links) == 12
    assert model.inventory is not None
    assert [item.gpu.uuid for item in model.inventory.gpus] == [uuid(gpu) for gpu in range(4)]
    assert model.problems == ()


def test_links_that_differ_by_direction_count_as_the_lower_number(tmp_path: Path) -> None:
    """With a sentence that says so."""
    host = NodeHost(tmp_path)
    host.say("nvlink 0 1 2", "nvlink 1 0 1")
    model = watch(host, ready).watcher.current.model
    assert model is not None
    assert {link.nvlinks for link in model.links.values()} == {1}
    assert model.problems == (
        "GPU 0 reports 2 NVLinks to GPU 1, which reports 1: the lower number is used",
    )


@pytest.mark.parametrize("function", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetHandleByIndex_v2"])
def test_one_lost_gpu_leaves_the_links_of_the_others(tmp_path: Path, function: str) -> None:
    """Whether its links fail, or all of it."""
    host = NodeHost(tmp_path, 4)
    links = [f"nvlink {a} {b} 2" for a in range(4) for b in range(4) if a != b]
    host.say(*links, f"fault fails {function} 15 3")
    model = watch(host, ready).watcher.current.model
    assert model is not None
    pairs = {(uuid(a), uuid(b)) for a in range(3) for b in range(3) if a != b}
    assert set(model.links) == pairs
    assert {link.nvlinks for link in model.links.values()} == {2}


def test_a_gpu_without_its_node_is_left_out(tmp_path: Path) -> None:
    """A container could not use it."""
    host = NodeHost(tmp_path)
    (host.root / "dev/nvidia1").unlink()
    model = watch(host, ready).watcher.current.model
    assert model is not None
    assert [gpu.gpu.uuid for gpu in model.gpus] == [uuid(0)]
    assert [device.uuid for device in model.left_out] == [uuid(1)]


def test_xids_come_with_the_device_that_the_driver_names(tmp_path: Path) -> None:
    """A GPU, an instance of it, or none that NVML lists."""
    host = NodeHost(tmp_path)

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        host.say("at 0 xid 1 79", "at 0 xid 0 94 9 1", "at 0.05 xid - 119")
        await observer.until(lambda: len(observer.events) == 3)

    events = watch(host, scenario).events
    assert [
        (event.kind, event.uuid, event.xid, event.gpu_instance, event.compute_instance)
        for event in events
    ] == [
        (EventKind.XID, uuid(1), 79, None, None),
        (EventKind.XID, uuid(0), 94, 9, 1),
        (EventKind.XID, "", 119, None, None),
    ]


def test_an_xid_of_a_gpu_that_is_gone_names_the_gpu(tmp_path: Path) -> None:
    """NVML no longer tells its UUID then."""
    host = NodeHost(tmp_path)

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        host.say("at 0 xid 1 79", "fault fails nvmlDeviceGetUUID 15 1")
        assert (await observer.until_event(EventKind.XID)).uuid == uuid(1)

    watch(host, scenario)


@pytest.mark.parametrize(
    ("fault", "kind", "device"),
    [
        ("fails nvmlDeviceRegisterEvents 3 1", EventKind.EVENTS_UNSUPPORTED, uuid(1)),
        ("fails nvmlDeviceRegisterEvents 999 1", EventKind.EVENTS_FAILED, uuid(1)),
        ("fails nvmlEventSetWait_v2 999", EventKind.WAIT_FAILED, ""),
        ("fails nvmlEventSetCreate 999", EventKind.WAIT_FAILED, ""),
    ],
)
def test_events_that_cannot_be_requested_are_reported(
    tmp_path: Path, fault: str, kind: EventKind, device: str
) -> None:
    """Once, with the device and NVML's description."""
    host = NodeHost(tmp_path)
    host.say(f"fault {fault}")

    async def scenario(observer: Observer) -> None:
        await observer.until_event(kind)
        await asyncio.sleep(0.2)

    (event,) = watch(host, scenario).events
    assert (event.kind, event.uuid) == (kind, device)
    assert event.text


@pytest.mark.parametrize("fault", ["lost 1", "fails nvmlDeviceGetTotalEnergyConsumption 15 1"])
def test_a_gpu_is_lost_comes_back_and_was_reset(tmp_path: Path, fault: str) -> None:
    """The others stay, and no wait for events has failed. NVML may still know its name."""
    host = NodeHost(tmp_path)

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        host.say(f"fault {fault}")
        await observer.until_event(EventKind.LOST)
        model = observer.watcher.current.model
        assert model is not None
        assert [gpu.gpu.uuid for gpu in model.gpus] == [uuid(0)]
        assert "GPU 1 is left out: GPU is lost" in model.problems
        host.say("at 0 reset 1")
        await observer.until_event(EventKind.RESET)

    events = watch(host, scenario).events
    assert [(event.kind, event.uuid) for event in events] == [
        (EventKind.LOST, uuid(1)),
        (EventKind.BACK, uuid(1)),
        (EventKind.RESET, uuid(1)),
    ]
    assert events[0].text == "GPU is lost"


def test_a_lost_gpu_does_not_keep_the_events_of_the_others(tmp_path: Path) -> None:
    """The driver may refuse to wait for events of a set with a lost GPU."""
    host = NodeHost(tmp_path)
    lost = (
        "fault fails nvmlDeviceGetTotalEnergyConsumption 15 1",
        "fault fails nvmlEventSetWait_v2 15 1",
    )

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        host.say(*lost)
        await observer.until_event(EventKind.LOST)
        async with asyncio.timeout(PATIENCE_S):
            while not any(event.kind is EventKind.XID for event in observer.events):
                host.say(*lost, "at 0 xid 0 48")
                await asyncio.sleep(0.3)

    assert EventKind.WAIT_FAILED not in {event.kind for event in watch(host, scenario).events}


def test_a_change_of_mig_devices_is_an_event(tmp_path: Path) -> None:
    """With the profiles that there are now."""
    host = NodeHost(tmp_path, 2, migs=[1])
    host.allow_mig("gpu1/gi1/ci0")

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        host.say(f"mig 1 0 {mig_uuid(1, 0)} 1 0 3 3 40448")
        await observer.until_event(EventKind.MIG_CHANGED)

    observer = watch(host, scenario)
    (event,) = observer.events
    assert (event.uuid, event.text) == (uuid(1), "MIG devices: 3g.40gb")
    model = observer.watcher.current.model
    assert model is not None
    assert [len(gpu.mig_devices) for gpu in model.gpus] == [0, 1]


def test_a_hanging_driver_is_a_state(tmp_path: Path) -> None:
    """The last model stays, telemetry ages, and the driver is ready when it answers again."""
    host = NodeHost(tmp_path)

    async def scenario(observer: Observer) -> None:
        watcher = observer.watcher
        await ready(observer)
        watcher.request_telemetry()
        await observer.until(watcher.request_telemetry)
        host.say("fault hangs nvmlDeviceGetTotalEnergyConsumption", "fault init-hangs")
        await observer.until_state(DriverState.HANGING)
        assert watcher.current.model is not None
        telemetry = watcher.request_telemetry()
        assert telemetry is not None
        assert telemetry.age_s > 0.2
        host.say()
        await ready(observer)

    observer = watch(host, scenario, dataclasses.replace(QUICK, first_deadline_s=3))
    hanging = [u.status for u in observer.updates if u.status.state is DriverState.HANGING]
    assert len({status.since for status in hanging}) == 1
    assert hanging[0].hint
    assert observer.events == []


def test_the_end_of_the_watcher_does_not_wait_for_the_driver(tmp_path: Path) -> None:
    """Its child, which hangs, is killed."""
    host = NodeHost(tmp_path)
    host.say("fault init-hangs")
    pids = []

    async def scenario(observer: Observer) -> None:
        await asyncio.sleep(0.3)
        assert observer.watcher.child_pid is not None
        pids.append(observer.watcher.child_pid)

    watch(host, scenario, dataclasses.replace(QUICK, grace_s=0.2))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_driver_comes_goes_and_comes_in_another_version(tmp_path: Path) -> None:
    """Each ends in the right state by itself, and the new version is an event."""
    host = NodeHost(tmp_path)
    host.remove_libraries()
    host.unload_module_files()

    async def scenario(observer: Observer) -> None:
        await observer.until_state(DriverState.ABSENT)
        host.restore_libraries()
        host.load_module()
        await ready(observer)
        host.unload_module()
        await observer.until_state(DriverState.ABSENT)
        # Half of an upgrade: the libraries are new, the module is not.
        host.load_module()
        host.rename_libraries(VERSION, "570.86.15")
        await observer.until_state(DriverState.MISMATCHED)
        host.load_module("570.86.15")
        host.driver = "570.86.15"
        host.say()
        await ready(observer)

    observer = watch(host, scenario)
    states = [update.status.state for update in observer.updates]
    kept = [
        state for state, before in zip(states, [None, *states], strict=False) if state != before
    ]
    assert [s for s in kept if s is not DriverState.STARTING][:2] == [
        DriverState.ABSENT,
        DriverState.READY,
    ]
    assert DriverState.HANGING not in kept
    (event,) = observer.events
    assert event.kind is EventKind.DRIVER_CHANGED
    model = observer.watcher.current.model
    assert model is not None
    assert model.driver_version == "570.86.15"


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "between two polls"])
def test_a_driver_that_is_loaded_again_is_another(tmp_path: Path, *, is_seen: bool) -> None:
    """In the same version: its GPUs were initialised again."""
    host = NodeHost(tmp_path)

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        if is_seen:
            host.unload_module()
            await observer.until_state(DriverState.ABSENT)
        host.load_module()
        host.say()
        await observer.until_event(EventKind.DRIVER_CHANGED)

    assert [event.kind for event in watch(host, scenario).events] == [EventKind.DRIVER_CHANGED]


def test_a_driver_that_goes_during_a_survey_loses_no_gpu(tmp_path: Path) -> None:
    """The state says that the driver is gone; its GPUs are neither lost nor back."""
    host = NodeHost(tmp_path)

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        host.say("fault fails nvmlDeviceGetHandleByIndex_v2 9")
        await observer.until_state(DriverState.FAILED)
        host.say()
        await ready(observer)

    observer = watch(host, scenario)
    assert observer.events == []
    assert all(len(update.model.gpus) == 2 for update in observer.updates if update.model)


def test_a_library_of_another_version_than_the_module(tmp_path: Path) -> None:
    """NVML's own check says the same as the names of the files."""
    host = NodeHost(tmp_path)
    host.say("fault init-fails 18")

    async def scenario(observer: Observer) -> None:
        await observer.until_state(DriverState.MISMATCHED)

    status = watch(host, scenario).watcher.current.status
    assert "version mismatch" in status.reason
    assert status.hint


def test_another_process_tries_again_what_one_cannot_do(tmp_path: Path) -> None:
    """NVML may fail for reasons that no file shows."""
    host = NodeHost(tmp_path)
    host.say("at 0-1.5 fault init-fails 999")

    async def scenario(observer: Observer) -> None:
        await observer.until_state(DriverState.FAILED)
        await ready(observer)

    watch(host, scenario, dataclasses.replace(QUICK, retry_s=0.5))


def test_a_child_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """Once is no fault of the driver: the state stays."""
    host = NodeHost(tmp_path)

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        pid = observer.watcher.child_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        # Events are lost until the next child waits for them.
        while not observer.events:
            host.say("at 0 xid 0 48")
            await asyncio.sleep(0.2)
        assert observer.watcher.child_pid != pid

    observer = watch(host, scenario)
    assert {event.kind for event in observer.events} == {EventKind.XID}
    assert {update.status.state for update in observer.updates} <= {
        DriverState.STARTING,
        DriverState.READY,
    }


def test_measurements_and_processes_of_gpus_and_mig_devices(tmp_path: Path) -> None:
    """A MIG device has memory and processes only; what NVML does not report is absent."""
    host = NodeHost(tmp_path, 2, migs=[1])
    host.allow_mig("gpu1/gi1/ci0")
    host.say(
        f"mig 1 0 {mig_uuid(1, 0)} 1 0 3 3 40448",
        *("value 0 temperature 61", "value 0 power_mw 250500", "value 0 used_mib 1000"),
        *("value 0 gpu_util 97", "value 0 ecc_uncorrected_aggregate 3", "value 1:0 used_mib 77"),
        *("process 0 4711 900", "process 1 4712 70 1 0"),
        "fault fails nvmlDeviceGetPcieReplayCounter 3 0",
    )

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        assert observer.watcher.request_telemetry() is None
        await observer.until(observer.watcher.request_telemetry)
        telemetry = observer.watcher.request_telemetry()
        assert telemetry is not None
        assert telemetry.age_s < PATIENCE_S
        gpu, parent, mig = telemetry.devices
        assert [gpu.uuid, parent.uuid, mig.uuid] == [uuid(0), uuid(1), mig_uuid(1, 0)]
        assert gpu.values["DCGM_FI_DEV_GPU_TEMP"] == 61
        assert gpu.values["DCGM_FI_DEV_POWER_USAGE"] == 250.5
        assert gpu.values["DCGM_FI_DEV_FB_USED"] == 1000
        assert gpu.values["DCGM_FI_DEV_FB_FREE"] == 80559
        assert gpu.values["DCGM_FI_DEV_GPU_UTIL"] == 97
        assert gpu.values["DCGM_FI_DEV_ECC_DBE_AGG_TOTAL"] == 3
        assert "DCGM_FI_DEV_PCIE_REPLAY_COUNTER" not in gpu.values
        assert mig.values["DCGM_FI_DEV_FB_USED"] == 77
        assert "DCGM_FI_DEV_GPU_TEMP" not in mig.values
        assert [(p.pid, p.memory_mib) for p in gpu.processes] == [(4711, 900)]
        assert [(p.pid, p.memory_mib) for p in mig.processes] == [(4712, 70)]

    watch(host, scenario)


def test_a_slow_consumer_gets_all_events_with_the_newest_state(tmp_path: Path) -> None:
    """However many updates there were in between."""
    host = NodeHost(tmp_path)

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        slow = observer.watcher.updates()
        first = await anext(slow)
        assert (first.status.state, first.events) == (DriverState.READY, ())
        waiting = asyncio.ensure_future(anext(slow))
        host.say("at 0 xid 0 48", "at 0.05 xid 1 63", "at 0.1 xid 0 64")
        await observer.until(lambda: len(observer.events) == 3)
        events = list((await waiting).events)
        if len(events) < 3:
            events += (await anext(slow)).events
        assert [event.xid for event in events] == [48, 63, 64]
        await slow.aclose()

    watch(host, scenario)


def test_the_child_is_small(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """It imports little: with gRPC in the parent, both have 60 MiB together."""
    host = NodeHost(tmp_path, 8)
    sizes = []

    async def scenario(observer: Observer) -> None:
        await ready(observer)
        sizes.append(proportional_kib(observer.watcher.child_pid))

    watch(host, scenario)
    record_property("summary", f"child of the watcher: {sizes[0]} KiB proportional set size")
    assert sizes[0] < 16 << 10


def proportional_kib(pid: int | None) -> int:
    """Return the proportional set size of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
    return int(fields["Pss"].split()[0])
