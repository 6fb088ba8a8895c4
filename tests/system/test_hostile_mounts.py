# SPDX-License-Identifier: Apache-2.0
"""Mounts of ours over files of a container: a read-only /etc, and kernels with mount(2) alone.

LINK-06, LINK-07, LINK-13 and NS-01 of the attack catalogue, each in a mount namespace of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hostile import cases

pytestmark = pytest.mark.system("unshare", "strace")
HOOK = Path(__file__).parents[2] / ".venv" / "bin" / "gpu-cdi-hook"
NEW_CALLS = "open_tree,mount_setattr,move_mount,fsopen,fsmount"
# What a kernel has: all, those of 5.2 to 5.11, or neither.
KERNELS = {"5.12": "", "5.11": "mount_setattr", "5.1": NEW_CALLS}


def run(program: str, work: Path, kind: str, way: str, missing: str) -> dict[str, Any]:
    """Run *program* where the system calls *missing* are; return what it printed."""
    tracer = []
    if missing:
        tracer = ["strace", "-f", "-o", str(work / "trace"), "-e", f"trace={missing},mount",
                  "-e", f"inject={missing}:error=ENOSYS", "--"]  # fmt: skip
    found = cases.play(program, work / "work", kind, way, tracer=tracer)
    found["injected"] = bool(missing) and "INJECTED" in (work / "trace").read_text()
    return found


def options(line: str) -> set[str]:
    """Return the options of a mount of its own, not those of its file system."""
    return set(line.split()[5].split(","))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("way", ["OPENAT2", "WALK"])
@pytest.mark.parametrize("kind", ["etc", "root", "link", "shared"])
def test_link_13_a_cache_that_cannot_be_written_is_covered(
    tmp_path: Path, kind: str, way: str, kernel: str
) -> None:
    """Read-only itself, private, nothing outside; the second start finds all done."""
    seen = run("cover.py", tmp_path, kind, way, KERNELS[kernel])
    first = seen["first"]
    assert seen["injected"] is bool(KERNELS[kernel])
    assert first["refused"] == ""
    assert first["warnings"] == first["gone"] == []
    (line,) = first["new"]
    assert line.split()[4] == f"{tmp_path}/work/root/etc/ld.so.cache"
    assert {"ro", "nosuid", "nodev", "noexec"} <= options(line)
    assert "shared:" not in line
    if kind != "link":
        assert seen["second"]["new"] == seen["second"]["gone"] == []
        assert seen["names"] == ["libx.so.1", "libown.so.1"]
    else:
        # The link led out: for the container, there was no cache.
        assert seen["names"] == ["libx.so.1"]
    assert not seen["writable"]
    assert seen["victim_kept"]
    assert seen["etc"] == ["ld.so.cache"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("way", ["OPENAT2", "WALK"])
def test_ns_01_a_cache_that_is_a_shared_mount_of_its_own(
    tmp_path: Path, way: str, kernel: str
) -> None:
    """What is mounted on it belongs to that mount, whatever the directory is on."""
    first = run("cover.py", tmp_path, "shared_file", way, KERNELS[kernel])["first"]
    assert first["refused"] == ""
    (line,) = first["new"]
    assert line.split()[4] == f"{tmp_path}/work/root/etc/ld.so.cache"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["missing", "directory"])
def test_link_13_where_nothing_can_be_covered_it_is_refused(
    tmp_path: Path, kind: str, kernel: str
) -> None:
    """The loader would not find the driver: said, and nothing half-mounted."""
    seen = run("cover.py", tmp_path, kind, "OPENAT2", KERNELS[kernel])
    for start in (seen["first"], seen["second"]):
        assert "would not find" in start["refused"]
        assert start["new"] == start["gone"] == []


def test_a_cache_that_can_be_written_is_not_covered(tmp_path: Path) -> None:
    """Else ldconfig could not replace it, and no package that runs it could be installed."""
    seen = run("cover.py", tmp_path, "writable", "OPENAT2", "")
    assert seen["first"]["new"] == seen["second"]["new"] == []
    assert seen["writable"]
    assert seen["names"] == ["libx.so.1", "libown.so.1"]
    assert seen["etc"] == ["ld.so.cache", "ld.so.conf", "ld.so.conf.d"]


@pytest.mark.parametrize("kind", ["link", "shared", "shared_file", "etc"])
def test_link_13_control_a_mount_by_path(tmp_path: Path, kind: str) -> None:
    """It follows the link, reaches the twin of a shared mount, and lets everybody write."""
    (line, *others) = run("cover.py", tmp_path, kind, "STRING", "")["first"]["new"]
    if kind == "link":
        assert line.split()[4].endswith("/outside/victim")
    elif kind.startswith("shared"):
        assert others
    else:
        assert "ro" not in options(line)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if KERNELS[kernel]])
@pytest.mark.parametrize("way", ["OPENAT2", "WALK"])
@pytest.mark.parametrize("kind", ["file", "link_out", "directory", "parent_link_out"])
def test_link_07_the_mask_without_the_newer_calls(
    tmp_path: Path, kind: str, way: str, kernel: str
) -> None:
    """As with them: inside, or refused."""
    seen = run("params.py", tmp_path, kind, way, KERNELS[kernel])
    assert seen["outside"] == seen["gone"] == []
    if kind in ("file", "link_out"):
        assert seen["injected"]
        assert seen["refused"] == ""
        assert seen["seen"] == "ModifyDeviceFiles: 0\n"
        assert seen["inside"] == [f"{tmp_path}/work/root{tmp_path}/work/outside/params"]
    else:
        assert seen["refused"]
        assert seen["inside"] == []
    params = tmp_path / "work" / "outside" / "params"
    assert params.read_text() == "ModifyDeviceFiles: 1\n"


def test_b056_a_proc_without_params_needs_no_mask(tmp_path: Path) -> None:
    """That of gVisor has none, and no library of the driver finds any there."""
    seen = run("params.py", tmp_path, "missing", "OPENAT2", "")
    assert seen["refused"] == ""
    assert seen["inside"] == seen["outside"] == seen["gone"] == []


@pytest.mark.parametrize("hook", ["create-symlinks", "update-container"])
def test_b102_a_mount_in_the_place_of_a_link_stays(tmp_path: Path, hook: str) -> None:
    """Somebody mounted what is to be there; the other links are made."""
    place = tmp_path / "rootfs" / "etc" / "icd.json"
    place.parent.mkdir(parents=True)
    for path in (place, tmp_path / "other"):
        path.write_text(path.name)
    (tmp_path / "config.json").write_text('{"root": {"path": "rootfs"}}')
    state = json.dumps({"ociVersion": "1.0.2", "bundle": str(tmp_path)})
    script = (
        'mount --bind "$1" "$2" && "$3" "$4" --link a::/etc/icd.json --link a::/etc/b; cat "$2"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", script, "sh",
         tmp_path / "other", place, HOOK, hook],
        input=state, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.stdout == "other"
    assert done.stderr.startswith('gpu-cdi-hook: warning: "/etc/icd.json" in the container is a')
    assert sorted(os.listdir(place.parent)) == ["b", "icd.json"]
    assert (place.parent / "b").is_symlink()
