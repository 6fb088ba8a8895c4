# SPDX-License-Identifier: Apache-2.0
"""Grants that are kept: given again while everything is as it was, and not a moment longer."""

from __future__ import annotations

import json
import os
import posix
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdi.wire import Edits
from gpuruntime import probes
from gpuruntime.grant import Grant
from gpuruntime.request.driver_options import DriverOptions
from gpuruntime.request.parse import Request
from gpuruntime.snapshots import grants
from gpuruntime.snapshots.grants import SavedGrants

if TYPE_CHECKING:
    from gpuruntime.probes import State

STAMP: list[object] = ["/etc/x.toml", 1, 2, 3, 4]
VALUES = {"health": "", "nvidia-container-runtime.mode": "jit-cdi"}
EDITS: Edits = {"env": ["A=é\n\t"], "mounts": [{"hostPath": "/x", "containerPath": "/y"}]}
GRANT = Grant(EDITS, notes=["a note"], warnings=["a warning"])
KEY = b'["jit-cdi",["all"]]'


class Host:
    """A directory to keep things in, and a file that the state is of."""

    def __init__(self, place: Path) -> None:
        place.chmod(0o755)
        self.directory = str(place)
        self.file = place / "ready.json"
        self.subject = place / "subject"
        self.subject.write_text("1")

    def state(self) -> State:
        """Return the state of the host as it is."""
        return probes.read(
            {
                probes.PROGRAM: [probes.PROGRAM, [probes.VERSION]],
                "subject": [probes.CONTENT, [str(self.subject)]],
            }
        )

    def change(self) -> None:
        """Make it another host."""
        self.subject.write_text(self.subject.read_text() + "1")

    def ready(self, stamp: list[object] | None = STAMP) -> SavedGrants:
        """Return what the next create finds."""
        found = SavedGrants(self.directory)
        found.use(stamp, VALUES)
        return found

    def keep(self, key: bytes = KEY, grant: Grant = GRANT, *, of_inventory: bool = True) -> None:
        """Keep *grant* as a create does."""
        self.ready().keep(key, grant, self.state(), of_inventory=of_inventory)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Return a host of which nothing is kept."""
    return Host(tmp_path)


@pytest.mark.parametrize("of_inventory", [True, False])
def test_what_is_kept_is_given_again(host: Host, of_inventory: bool) -> None:
    """With its notes, and the config that was in force."""
    assert host.ready().find(KEY) is None
    host.keep(of_inventory=of_inventory)
    assert host.ready().find(KEY) == GRANT
    assert SavedGrants(host.directory).values(STAMP) == VALUES
    assert oct(host.file.stat().st_mode) == "0o100644"
    for other in (KEY[1:], KEY[:-1], b"", b"[", KEY + b"\t"):
        assert host.ready().find(other) is None


@pytest.mark.parametrize("of_inventory", [True, False])
def test_on_another_host_it_is_nothing(host: Host, of_inventory: bool) -> None:
    """And the grant that follows takes its place."""
    host.keep(of_inventory=of_inventory)
    host.change()
    assert host.ready().find(KEY) is None
    later = Grant(EDITS, notes=["later"])
    host.keep(grant=later, of_inventory=of_inventory)
    assert host.ready().find(KEY) == later


def test_a_new_state_takes_the_old_inventory_away_with_it(host: Host) -> None:
    """An entry that is not asked for must not come back with the new state."""
    host.keep(b"old")
    host.change()
    host.keep(b"new")
    assert host.ready().find(b"old") is None
    assert host.ready().find(b"new") == GRANT


def test_entries_of_specs_and_of_the_inventory_stay_together(host: Host) -> None:
    """A node may have containers of both kinds."""
    host.keep(b"specs", of_inventory=False)
    host.keep(b"machine")
    # Only the head of the file is new: what is of specs has to be made once more.
    host.keep(b"specs", of_inventory=False)
    assert host.ready().find(b"machine") == GRANT
    assert host.ready().find(b"specs") == GRANT


def test_under_another_config_it_is_nothing(host: Host) -> None:
    """Also where there is none now."""
    host.keep()
    for stamp in ([*STAMP[:-1], 5], None):
        assert host.ready(stamp).find(KEY) is None
        assert stamp is None or SavedGrants(host.directory).values(stamp) is None


def test_without_a_config_file_things_are_kept_too(host: Host) -> None:
    """As on most machines."""
    host.ready(None).keep(KEY, GRANT, host.state(), of_inventory=True)
    assert host.ready(None).find(KEY) == GRANT
    assert host.ready().find(KEY) is None


def test_it_does_not_grow(host: Host) -> None:
    """The oldest goes first; images cannot fill it with what they ask for."""
    host.keep(b"x" * (grants.MAX_KEY_BYTES + 1))
    assert not host.file.exists()
    for number in range(grants.MAX_ENTRIES + 2):
        host.keep(b"%d" % number)
    assert len(host.file.read_bytes().splitlines()) == 1 + grants.MAX_ENTRIES
    assert host.ready().find(b"1") is None
    assert host.ready().find(b"2") == GRANT
    large = Grant({"env": ["A=" + "x" * (grants.MAX_BYTES // 5)]})
    for number in range(4):
        host.keep(b"large %d" % number, large)
    assert host.file.stat().st_size < grants.MAX_BYTES
    assert host.ready().find(b"large 3") == large
    host.keep(b"huge", Grant({"env": ["A=" + "x" * grants.MAX_BYTES]}))
    assert host.ready().find(b"huge") is None


def spoiled(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return *data* with another head."""
    head, _, rest = data.partition(b"\n")
    document = json.loads(head)
    change(document)
    return json.dumps(document).encode() + b"\n" + rest


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"",
        lambda _: b"\n\n\n",
        lambda _: b"\x00\xff",
        lambda data: data[:-2],
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b'"edits"', b'"edit"'),
        lambda data: data.replace(b"\t{", b"\t["),
        lambda data: data.replace(b'"notes":[', b'"notes":7,"x":['),
        lambda data: spoiled(data, lambda head: head.update(format=0)),
        lambda data: spoiled(data, lambda head: head.update(version="0")),
        lambda data: spoiled(data, lambda head: head.update(state=None)),
        lambda data: spoiled(data, lambda head: head.update(state=[1])),
        lambda data: spoiled(data, lambda head: head.pop("state")),
        lambda data: spoiled(data, lambda head: head.pop("config")),
    ],
)
def test_what_cannot_be_read_is_nothing(host: Host, spoil: Callable[[bytes], bytes]) -> None:
    """Cut off, of another version, or not ours at all; the next create writes it anew."""
    host.keep()
    host.file.write_bytes(spoil(host.file.read_bytes()))
    assert host.ready().find(KEY) is None
    host.keep()
    assert host.ready().find(KEY) == GRANT


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "for all to write"])
def test_what_others_could_have_put_there_is_nothing(host: Host, kind: str) -> None:
    """Nor does it hang."""
    host.keep()
    if kind == "for all to write":
        host.file.chmod(0o666)
    else:
        moved = host.file.rename(host.file.with_name("moved"))
        if kind == "link":
            host.file.symlink_to(moved)
        elif kind == "fifo":
            os.mkfifo(host.file)
        else:
            host.file.mkdir()
    assert host.ready().find(KEY) is None


def test_where_nothing_can_be_kept_nothing_fails(tmp_path: Path) -> None:
    """As for engines without root."""
    found = SavedGrants(str(tmp_path / "missing" / "run"))
    found.use(None, {})
    found.keep(KEY, GRANT, {}, of_inventory=True)
    assert found.find(KEY) is None


def test_the_directory_is_made_where_there_is_none(host: Host) -> None:
    """Where CDI specs are all that is asked for, nobody else makes it."""
    host.directory = f"{host.directory}/run"
    host.keep(of_inventory=False)
    assert host.ready().find(KEY) == GRANT
    assert stat.S_IMODE(Path(host.directory).stat().st_mode) == 0o755


def test_a_directory_that_goes_away_meanwhile_fails_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody clears /run/gpuruntime while a container is created."""

    def clear(_fd: int, _mode: int) -> None:
        shutil.rmtree(host.directory)

    monkeypatch.setattr(posix, "fchmod", clear)
    host.keep()
    assert not Path(host.directory).exists()


def test_keys_tell_requests_apart() -> None:
    """Everything that a grant is made from beside the host and the config is in them."""
    requests = [
        Request("jit-cdi", "environment", ("a=0",)),
        Request("legacy", "environment", ("a=0",)),
        Request("jit-cdi", "environment", ("a=0", "a=1")),
        Request("jit-cdi", "environment", ("a=0,a=1",)),
        Request("jit-cdi", "environment", driver_only=True),
        *(
            Request("jit-cdi", "environment", ("a=0",), extras)
            for extras in (
                DriverOptions(("compute",)),
                DriverOptions((), ("compute",)),
                DriverOptions(imex=(1,)),
                DriverOptions(features=("gds",)),
                DriverOptions(mig=("gds",)),
            )
        ),
    ]
    keys = [grants.key(asked, hook) for asked in requests for hook in ("/a", "/b")]
    assert len({*keys}) == len(keys)
    assert not any(set(key) & set(b"\n\t") for key in keys)
    # Not where it was asked for.
    again = Request("jit-cdi", "annotations", ("a=0",))
    assert grants.key(again, "/a") == keys[0]
