# SPDX-License-Identifier: Apache-2.0
"""Real containers by every low-level runtime and engine: what they see, and what is left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from scenarios.machine import differences, run_scenario, snapshot

SYSTEM = ("runc_v1", "runc_v2", "crun")
ENGINES = ("docker", "containerd", "podman_json", "podman_yaml")
CONTROL = {
    "/dev/nvidiactl": "195:255",
    "/dev/nvidia-modeset": "195:254",
    "/dev/nvidia-uvm": None,
    "/dev/nvidia-uvm-tools": None,
}
# Only these scenarios can have the driver's entries in the container's own /proc.
WITH_PROC = SYSTEM


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every container test leaves the machine as it was."""
    before = snapshot()
    yield
    assert differences(before) == []


def rows(output: str, word: str) -> list[list[str]]:
    """Return the rest of each line of *output* that begins with *word*."""
    return [line.split()[1:] for line in output.splitlines() if line.split()[:1] == [word]]


@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(name, marks=pytest.mark.system) for name in SYSTEM),
        *(pytest.param(name, marks=pytest.mark.engine) for name in ENGINES),
    ],
)
@pytest.mark.parametrize("devices", ["1,3", "0"])
def test_a_container_has_what_it_asked_for_and_no_more(scenario: str, devices: str) -> None:
    """Nodes with their numbers, access granted and refused, libraries, environment."""
    done = run_scenario(scenario, devices)
    assert done.returncode == 0, done.stderr
    granted = {f"/dev/nvidia{index}": f"195:{index}" for index in devices.split(",")}
    nodes = dict(rows(done.stdout, "node"))
    assert set(nodes) == {*granted, *CONTROL}
    for path, numbers in (granted | CONTROL).items():
        if numbers is not None:
            assert nodes[path] == numbers
    # No driver is behind the nodes of a simulated host: allowed is ENXIO, refused is EPERM.
    assert {answer for _, answer in rows(done.stdout, "open")} == {"ENXIO"}
    assert rows(done.stdout, "mknod") == [["EPERM"]]
    assert rows(done.stdout, "load") == [
        ["libcuda.so.1", "yes"],
        ["libcuda.so", "yes"],
        ["libnvidia-ml.so.1", "yes"],
    ]
    assert rows(done.stdout, "needed") == [["0", "12040"]]
    environment = [row[0] for row in rows(done.stdout, "env")]
    assert "MINE=kept" in environment
    assert [e for e in environment if e.startswith("NVIDIA_")] == ["NVIDIA_VISIBLE_DEVICES=void"]
    if scenario in WITH_PROC:
        assert rows(done.stdout, "params") == [["ModifyDeviceFiles:", "0"]]


@pytest.mark.system
def test_all_and_none_give_every_gpu_and_only_the_driver() -> None:
    """`none` is for containers that need the driver's files and control nodes alone."""
    for devices, gpus in (("all", 8), ("none", 0)):
        done = run_scenario("runc_v1", devices)
        assert done.returncode == 0, done.stderr
        paths = [path for path, _ in rows(done.stdout, "node")]
        assert len([p for p in paths if re.fullmatch(r"/dev/nvidia\d+", p)]) == gpus
        assert set(CONTROL) <= set(paths)
        assert rows(done.stdout, "load")[0] == ["libcuda.so.1", "yes"]


@pytest.mark.system
@pytest.mark.parametrize("devices", ["void", ""])
def test_a_container_that_asks_for_nothing_gets_nothing(devices: str) -> None:
    """`void` says that somebody has injected already; empty is what unset is."""
    done = run_scenario("runc_v1", devices)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout, "node") == []
    assert rows(done.stdout, "load")[0][1] != "yes"


@pytest.mark.engine
def test_docker_shows_our_error_as_its_own() -> None:
    """The user of an engine never sees the runtime's stderr: the log record must carry it."""
    done = run_scenario("docker_errors", "9")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for case, wanted in (("bad", '"nvidia.com/gpu=9"'), ("none", "no CDI spec found")):
        status, output, errors = seen[case]
        assert status == 125
        assert output == ""
        assert f"gpu-container-runtime: device: {'no CDI spec'}" in errors
        assert wanted in errors
        assert "\nhint: " in errors
    assert "node" not in seen["plain"]
    assert "env PATH=" in seen["plain"]


@pytest.mark.engine
def test_a_docker_container_survives_restart_and_exec() -> None:
    """The hook runs again on a restart: it must find its own work done, and add nothing."""
    done = run_scenario("docker_life", "2")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for run in ("first", "second"):
        assert ["/dev/nvidia2", "195:2"] in rows(seen[run], "node")
        assert rows(seen[run], "load")[0] == ["libcuda.so.1", "yes"]
    changes, again = (sorted(diff.splitlines()) for diff in seen["diffs"])
    assert "A /etc/ld.so.cache" in changes
    assert changes == again
