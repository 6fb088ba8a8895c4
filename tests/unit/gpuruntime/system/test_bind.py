# SPDX-License-Identifier: Apache-2.0
"""LINK-12, NS-01: the mounts of the prestart hook, each case in a mount namespace of its own.

Without a container; tests/system/test_prestart.py has one.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import descriptors
import pytest
from hostile import cases

from gpuruntime.errors import MountError
from gpuruntime.system import bind
from gpuruntime.system.bind import BindMount
from gpuruntime.system.paths import Root

LIBRARY, CHANNELS = "usr/lib/libcuda.so.1", "run/channels"
needs_mounts = pytest.mark.system("unshare", "mount")


def play(work: Path, kind: str, how: str = "ours") -> dict[str, Any]:
    """Return what came of one case."""
    return cases.play("binds.py", work / "work", kind, how)


@needs_mounts
@pytest.mark.parametrize("kind", ["absolute", "climbing", "relative", "nowhere", "parent"])
def test_link_12_no_file_is_made_where_a_link_leads(tmp_path: Path, kind: str) -> None:
    """Its directory is there on the host, the file is not: it would be made, by root."""
    seen = play(tmp_path, kind)
    assert seen["outside"] == []
    assert "cannot mount" in seen["refused"]
    assert seen["ours"] == {}
    assert seen["elsewhere"] == ["root"]


@needs_mounts
@pytest.mark.parametrize("kind", ["absolute", "relative", "parent"])
def test_link_12_control_by_its_path_a_file_is_made(tmp_path: Path, kind: str) -> None:
    """The weak hook opens what is there, and makes it if it is not."""
    (made,) = play(tmp_path, kind, "naive")["outside"]
    assert made == ("libcuda.so.1" if kind == "parent" else "new")


@needs_mounts
@pytest.mark.parametrize("kind", ["usual", "shared"])
def test_ns_01_what_is_mounted_is_nobody_s_peer(tmp_path: Path, kind: str) -> None:
    """Neither is it on the host, nor is what the host mounts later in the container."""
    seen = play(tmp_path, kind)
    assert seen["refused"] == ""
    # Without "shared:", "master:" and the like.
    assert seen["ours"] == {LIBRARY: [], CHANNELS: []}
    assert seen["later"] == []
    assert seen["elsewhere"] == (["host", "root", "twin"] if kind == "shared" else ["root"])


@needs_mounts
def test_ns_01_control_a_mount_by_its_path_is_a_peer(tmp_path: Path) -> None:
    """Of the host's, and of the root's other places."""
    seen = play(tmp_path, "shared", "naive")
    assert seen["later"] == [f"{CHANNELS}/later"]
    assert f"twin/{LIBRARY}" in seen["elsewhere"]
    assert all("shared:" in " ".join(fields) for fields in seen["ours"].values())


@pytest.mark.parametrize("call", ["open_tree", "mount_setattr", "move_mount"])
def test_what_cannot_be_mounted_is_refused(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel answers: the container would be without a part of the driver."""
    code = 0

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    file = tmp_path / "file"
    file.touch()
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(bind.syscalls, "open_tree", lambda *_: os.open(file, os.O_PATH))
    monkeypatch.setattr(bind.syscalls, "mount_setattr", lambda *_: None)
    monkeypatch.setattr(bind, "stop_propagation", lambda *_: None)
    monkeypatch.setattr(bind.syscalls, call, fail)
    root = Root(str(tmp_path / "root"))
    before = len(descriptors.opened())
    for code in sorted(errno.errorcode):
        with pytest.raises(MountError, match="cannot mount") as caught:
            BindMount(str(file), "/opt/file", ("ro",)).execute(root, pytest.fail)
        assert os.strerror(code) in caught.value.message
    assert len(descriptors.opened()) == before
    root.close()


def test_race_05_another_hook_makes_the_place_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers on one root: whoever comes second mounts on what is there."""
    make = bind._make_file

    def make_twice(place: int, name: str) -> None:
        make(place, name)
        make(place, name)

    monkeypatch.setattr(bind, "_make_file", make_twice)
    place, target = bind._open_target(Root(str(tmp_path)), "/opt/file", bind._make_file)
    os.close(place)
    os.close(target)
    assert (tmp_path / "opt" / "file").is_file()
