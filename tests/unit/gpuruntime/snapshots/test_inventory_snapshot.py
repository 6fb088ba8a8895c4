# SPDX-License-Identifier: Apache-2.0
"""The inventory is discovered once for a host, by one of many, and kept only while it fits.

The real thing, with a driver, is tests/system/test_snapshot.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import descriptors
import pytest

from gpuruntime import probes
from gpuruntime.errors import DiscoveryError, DriverError, GpuRuntimeError
from gpuruntime.model import Driver, Inventory
from gpuruntime.snapshots import inventory_json, inventory_snapshot
from gpuruntime.snapshots.inventory_snapshot import InventorySnapshot

PATIENCE_S = 10.0
ROOT = "/driver"


class Host:
    """A host with one fact, the file *mark*; its driver answers with its version, and counts."""

    def __init__(self, place: Path) -> None:
        self.directory = str(place / "run")
        self.mark = place / "mark"
        self.change()
        self.asked = 0
        self.version = "1"
        self.error: GpuRuntimeError | None = None
        self.meanwhile: Callable[[], object] = int
        # Whether another process would have the same answer.
        self.is_shared = True
        self.busy = threading.Lock()

    def change(self) -> None:
        """Become another host."""
        # By its name: the clock of a file system may stand still.
        new = self.mark.with_suffix(".new")
        new.touch()
        new.rename(self.mark)
        os.truncate(self.mark, self.mark.stat().st_ino % 1000)

    def discover(self) -> dict[str, Any]:
        """Answer as gpuruntime.slowpath_server does."""
        assert self.busy.acquire(blocking=False), "two discoveries at the same time"
        try:
            self.asked += 1
            version, error = self.version, self.error
            plan = {
                probes.PROGRAM: [probes.PROGRAM, [probes.VERSION]],
                "mark": [probes.IDENTITY, [str(self.mark)]],
            }
            state = probes.read(plan)
            self.meanwhile()
        finally:
            self.busy.release()
        if error is not None:
            kind = type(error).__name__
            failure = {"class": kind, "message": error.message, "hint": error.hint}
            return {"error": failure, "state": state, "shared": self.is_shared}
        found = Inventory(
            driver=Driver(version=version, libraries=(), files=()), gpus=(), control_nodes=()
        )
        inventory = inventory_json.encode(found)
        return {"inventory": inventory, "state": state, "shared": self.is_shared}

    def cache(self, root: str = ROOT, patience_s: float = PATIENCE_S) -> InventorySnapshot:
        """Return the cache of another process."""
        return InventorySnapshot(root, self.discover, patience_s, self.directory)

    def get(self, *, fresh: bool = False) -> tuple[str, bool]:
        """Return the driver's version, and whether that was asked for now."""
        found = self.cache().get(fresh=fresh)
        return found.inventory.driver.version, found.is_fresh

    @property
    def snapshot(self) -> Path:
        """The file of the snapshot."""
        return Path(self.directory, inventory_snapshot.SNAPSHOT)

    @property
    def failure(self) -> Path:
        """The file of the last failure."""
        return Path(self.directory, inventory_snapshot.FAILURE)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return a host without a snapshot."""
    tmp_path.chmod(0o755)
    return Host(tmp_path)


def test_the_driver_is_asked_once_for_a_host(host: Host) -> None:
    """And again when that is another."""
    assert host.cache().read() is None
    assert host.get() == ("1", True)
    host.version = "2"
    assert host.get() == ("1", False)
    found = host.cache().read()
    assert found is not None
    assert found.inventory.driver.version == "1"
    host.change()
    assert host.cache().read() is None
    assert host.get() == ("2", True)
    assert host.asked == 2


def test_who_wants_a_fresh_answer_gets_one(host: Host) -> None:
    """It is kept for those who do not."""
    host.get()
    host.version = "2"
    assert host.get(fresh=True) == ("2", True)
    assert host.get() == ("2", False)
    assert host.asked == 2


def test_what_changes_during_the_discovery_is_noticed_by_the_next(host: Host) -> None:
    """The state is that from before: what was read of files then may be of either host."""
    host.meanwhile = host.change
    host.get()
    host.meanwhile = int
    host.version = "2"
    assert host.get() == ("2", True)


def test_each_driver_root_has_its_own(host: Host) -> None:
    """An engine with another config file must not get the driver of this one."""
    host.get()
    assert host.cache("/other").read() is None
    host.cache("/other").get()
    assert host.asked == 2


def test_snapshot_and_directory_are_for_all_to_read(host: Host) -> None:
    """Whatever the umask: a rootless engine reads them; the lock is for root alone."""
    umask = os.umask(0o077)
    try:
        host.get()
    finally:
        os.umask(umask)
    modes = {
        name: stat.S_IMODE(os.stat(Path(host.directory, name)).st_mode)
        for name in (".", inventory_snapshot.SNAPSHOT, inventory_snapshot.LOCK)
    }
    assert list(modes.values()) == [0o755, 0o644, 0o600]
    assert sorted(os.listdir(host.directory)) == ["inventory.json", "inventory.lock"]


def test_nothing_stays_open(host: Host) -> None:
    """The low-level runtime would have it, and hold the lock as long as the container lives."""
    before = descriptors.opened()
    host.get()
    host.get(fresh=True)
    host.error = DriverError("gone")
    with pytest.raises(DriverError):
        host.get(fresh=True)
    assert descriptors.opened() == before


def spoiled(host: Host, **members: object) -> None:
    """Have other *members* in the snapshot."""
    content = json.loads(host.snapshot.read_text())
    host.snapshot.write_text(json.dumps({**content, **members}))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda host: host.snapshot.write_text(""),
        lambda host: host.snapshot.write_text("[]"),
        lambda host: host.snapshot.write_bytes(b"\xff"),
        lambda host: host.snapshot.write_text("[" * 10_000),
        lambda host: os.truncate(host.snapshot, 100),
        lambda host: os.truncate(host.snapshot, 1 << 30),
        lambda host: spoiled(host, format=inventory_snapshot.FORMAT + 1),
        lambda host: spoiled(host, state=None),
        lambda host: spoiled(host, state={}),
        lambda host: spoiled(host, state={"program": ["program", {"version": "0.0.0"}]}),
        lambda host: spoiled(host, state={"program": ["program", 1], "mark": "x"}),
        lambda host: spoiled(host, inventory=None),
        lambda host: spoiled(host, inventory={"driver": {}}),
        lambda host: host.snapshot.chmod(0o664),
        lambda host: host.snapshot.chmod(0o646),
        lambda host: Path(host.directory).chmod(0o777),
        lambda host: host.snapshot.rename(host.snapshot.with_suffix(".x")),
    ],
)
def test_a_snapshot_that_cannot_be_used_is_none(
    host: Host, spoil: Callable[[Host], object]
) -> None:
    """Neither believed nor an error."""
    host.get()
    spoil(host)
    host.version = "2"
    assert host.cache().read() is None
    assert host.get() == ("2", True)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_file_is_no_snapshot(host: Host, kind: str) -> None:
    """Opening a pipe would wait for somebody who writes."""
    host.get()
    elsewhere = host.snapshot.with_suffix(".x")
    host.snapshot.rename(elsewhere)
    if kind == "link":
        host.snapshot.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(host.snapshot)
    else:
        host.snapshot.mkdir()
    host.version = "2"
    assert host.get() == ("2", True)
    left = [name for name in os.listdir(host.directory) if name.startswith(".")]
    assert left == []
    # Only a directory stays in the way.
    assert host.get() == ("2", kind == "directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_snapshot_of_another_user_is_none(host: Host) -> None:
    """Who could write it could give any device of the host to any container."""
    host.get()
    os.chown(host.snapshot, 1000, 1000)
    assert host.get() == ("1", True)
    assert host.snapshot.stat().st_uid == 0


@pytest.mark.parametrize("place", ["/dev/null", "/proc/gpuruntime"])
def test_without_a_place_to_keep_it_the_driver_is_asked_each_time(host: Host, place: str) -> None:
    """By an engine that is not root, or on a read-only file system."""
    host.directory = place
    assert [host.get(), host.get()] == [("1", True), ("1", True)]
    assert host.asked == 2
    host.error = DiscoveryError("no files", "look for them")
    with pytest.raises(DiscoveryError) as caught:
        host.get()
    assert caught.value.lines() == "detection: no files\nhint: look for them"


def test_a_failure_is_remembered_for_a_while(host: Host) -> None:
    """Its class, its text and its hint, with when it was."""
    host.error = DriverError("the driver is not loaded", "load it")
    with pytest.raises(DriverError) as caught:
        host.get()
    assert caught.value.message == "the driver is not loaded"
    host.error = None
    for fresh in (False, True):
        with pytest.raises(
            DriverError, match=r"not loaded \(0\.\d s ago; tried again after 5 s"
        ) as caught:
            host.get(fresh=fresh)
        assert caught.value.hint == "load it"
    assert host.asked == 1


@pytest.mark.parametrize("change", ["time", "clock", "host", "rubbish", "class", "untrusted"])
def test_a_failure_is_forgotten(host: Host, change: str) -> None:
    """When it is old, when the clock cannot be, on another host, and if we did not write it."""
    host.error = DriverError("the driver is not loaded")
    with pytest.raises(DriverError):
        host.get()
    host.error = None
    content = json.loads(host.failure.read_text())
    if change == "time":
        content["at"] -= inventory_snapshot.FAILURE_S
    elif change == "clock":
        content["at"] += 60
    elif change == "host":
        host.change()
    elif change == "rubbish":
        content["at"] = "now"
    elif change == "class":
        content["error"]["class"] = "Nonsense"
    else:
        host.failure.chmod(0o666)
    host.failure.write_text(json.dumps(content))
    assert host.get() == ("1", True)


@pytest.mark.parametrize(
    "error",
    [
        GpuRuntimeError('cannot start "python": Resource temporarily unavailable'),
        GpuRuntimeError('"python" did not answer the question "discover"'),
        DriverError("the driver did not answer in 30 s"),
    ],
)
def test_what_the_limits_of_a_process_did_is_remembered_for_nobody(
    host: Host, error: GpuRuntimeError
) -> None:
    """A child that cannot be started, is killed or gets no time is not the driver's answer."""

    def discover() -> Any:
        raise error

    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            InventorySnapshot(ROOT, discover, PATIENCE_S, host.directory).get()
        assert caught.value.message == error.message
    assert not host.failure.exists()
    assert host.get() == ("1", True)


@pytest.mark.parametrize("error", [None, DriverError("Insufficient Permissions")])
def test_an_answer_that_holds_for_no_other_process_is_kept_for_none(
    host: Host, error: GpuRuntimeError | None
) -> None:
    """A GPU is missing in it that this process alone may not open: others would lack it, too."""
    host.is_shared, host.error = False, error
    if error is None:
        found = host.cache().get()
        # Without a state, no grant is kept that was made of it.
        assert (found.inventory.driver.version, found.state) == ("1", None)
    else:
        with pytest.raises(DriverError, match="Insufficient"):
            host.get()
    assert os.listdir(host.directory) == ["inventory.lock"]
    host.is_shared, host.error = True, None
    assert host.get() == ("1", True)
    assert host.get() == ("1", False)


def test_a_failure_does_not_hide_a_snapshot_that_fits(host: Host) -> None:
    """The driver failed somebody who wanted a fresh answer; all others have theirs."""
    host.get()
    host.error = DriverError("gone")
    with pytest.raises(DriverError):
        host.get(fresh=True)
    assert host.get() == ("1", False)


def together(number: int, call: Callable[[], object]) -> list[object]:
    """Return what *call* returned, or raised, in that many threads at once."""
    found: list[object] = []
    barrier = threading.Barrier(number)

    def run() -> None:
        barrier.wait()
        try:
            found.append(call())
        except GpuRuntimeError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == number
    return found


@pytest.mark.parametrize("number", [2, 6])
def test_many_at_once_ask_the_driver_once(host: Host, number: int) -> None:
    """The others wait for the one that asks, and take its answer."""
    host.meanwhile = lambda: time.sleep(0.3)
    found = together(number, host.get)
    assert {version for version, _ in found} == {"1"}  # type: ignore[misc]
    assert host.asked == 1


def test_who_wants_a_fresh_answer_takes_none_from_before_it_came(host: Host) -> None:
    """But one that was asked for while it waited."""
    began = threading.Event()

    def meanwhile() -> None:
        began.set()
        time.sleep(0.3)

    host.meanwhile = meanwhile
    first = threading.Thread(target=host.get)
    first.start()
    assert began.wait(10)
    # MIG devices are made while the first answer is under way.
    host.version = "2"
    found = together(3, lambda: host.get(fresh=True))
    first.join(60)
    assert found == [("2", True)] * 3
    assert host.asked == 2


def test_many_at_once_share_a_failure(host: Host) -> None:
    """Nobody asks a dead driver again, one by one."""
    host.meanwhile = lambda: time.sleep(0.3)
    host.error = DriverError("gone")
    found = together(4, host.get)
    assert all(isinstance(error, DriverError) for error in found)
    assert host.asked == 1


def test_waiting_has_an_end(host: Host) -> None:
    """A create whose cgroup gets no time holds the lock: after a while another asks itself.

    And keeps the answer, so that the next ones need not wait. Who needs nothing does not wait.
    """
    host.get()
    fd = os.open(Path(host.directory, inventory_snapshot.LOCK), os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert host.get() == ("1", False)
        host.change()
        host.version = "2"
        start = time.monotonic()
        assert host.cache(patience_s=0.2).get().inventory.driver.version == "2"
        assert 0.2 <= time.monotonic() - start < PATIENCE_S
        assert host.get() == ("2", False)
    finally:
        os.close(fd)
    assert host.asked == 2
