# SPDX-License-Identifier: Apache-2.0
"""Containers with a read-only root have the GPU that they ask for, or do not start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import reachable
from scenarios.machine import SCENARIOS, TREE, run_on_host

pytestmark = pytest.mark.system("runc", "crun", "gcc")
LOADED = "load /usr/lib/x86_64-linux-gnu/libcuda.so.1"
LINK = "usr/lib/x86_64-linux-gnu/libcuda.so.1"
CACHE = "etc/ld.so.cache"
# crun is in front of its hooks, and what our runtime does ahead needs a mount and no other owner.
REFUSED = {("crun", "in a user namespace"), ("crun", "a root that is no mount")}
HOOK = TREE / ".venv/bin/gpu-cdi-hook"
# The hook in front of a container, on a root that cannot be written at all.
SCRIPT = """\
mount --bind "$1/rootfs" "$1/rootfs"
mount -o remount,bind,ro "$1/rootfs"
before=$(wc -l < /proc/self/mountinfo)
"$2" update-container "$3" --library liba.so::/opt/liba.so.1::x86-64 < "$1/state"
echo "status $? mounts $(($(wc -l < /proc/self/mountinfo) - before))"
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return what every case came to."""
    return run_on_host(SCENARIOS / "read_only.py", "runc", "crun")


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize(
    "case",
    [
        *("as it is", "a volume on /etc", "a root that is no mount"),
        pytest.param("in a user namespace", marks=reachable.by_others),
    ],
)
def test_a_read_only_root(results: dict[str, Any], runtime: str, case: str) -> None:
    """Libraries found and parameters masked, also where the same was given before; or nothing."""
    turns = results[runtime][case]
    assert len(turns) == 2
    for seen in turns:
        if (runtime, case) in REFUSED:
            assert seen["status"] != 0
            assert "gpu-cdi-hook" in seen["output"]
            assert not {LINK, CACHE} & set(seen["new"])
            continue
        assert seen["status"] == 0, seen["output"]
        assert LOADED in seen["output"].splitlines()
        assert LINK in seen["new"]
        # With a volume there, the image's own is as it was.
        assert (CACHE in seen["new"]) is (case != "a volume on /etc")
        if case != "in a user namespace":
            assert "ModifyDeviceFiles: 0" in seen["output"]
        assert not [name for name in seen["new"] if ".gpuruntime." in name]


def test_ns_01_ahead_nothing_is_mounted(tmp_path: Path) -> None:
    """One over the cache would be on the host, and stay; the hook in the container makes it."""
    root = tmp_path / "rootfs"
    for name in ("etc", "opt"):
        (root / name).mkdir(parents=True)
    (root / CACHE).touch()
    (tmp_path / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    (tmp_path / "state").write_text(json.dumps({"bundle": str(tmp_path)}))
    said = {
        switch: subprocess.run(
            ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", tmp_path, HOOK, switch],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for switch in ("--ahead", "--ahead=false")
    }  # fmt: skip
    assert said == {"--ahead": "status 1 mounts 0\n", "--ahead=false": "status 0 mounts 1\n"}
