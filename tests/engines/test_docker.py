# SPDX-License-Identifier: Apache-2.0
"""A real dockerd that knows our runtime by path: containers, errors, restart, a killed test."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest
from containers import machine, seen

pytestmark = pytest.mark.engine("dockerd", "docker", "containerd", "runc")

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def refused() -> dict[str, Any]:
    """Return what docker answered to requests that cannot be met, and to others beside them."""
    answers: dict[str, Any] = seen.play("docker-refused", "9")["refused"]
    return answers


@pytest.mark.parametrize("devices", ["1,3", "0"])
def test_a_docker_container_has_the_gpus_it_asked_for_and_no_other(devices: str) -> None:
    """`docker run --runtime` is how most people will meet us."""
    found = seen.play("docker", devices)
    seen.assert_gpu_container(found, {int(index) for index in devices.split(",")})
    seen.assert_unasked_is_unchanged(found)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("none-such", 'device: no CDI spec in "/etc/cdi", "/var/run/cdi" defines', "ask for"),
        ("no-spec", "device: no CDI spec found in", 'run "gpuruntime cdi generate'),
    ],
)
def test_docker_s_error_is_our_text(
    name: str, message: str, hint: str, refused: dict[str, Any]
) -> None:
    """The user of an engine never sees the runtime's stderr: the log record must carry it."""
    answer = refused[name]
    status, _, errors = answer["direct"]
    assert status == 1
    assert errors.count("\n") == 2
    assert errors.startswith(f"gpu-container-runtime: {message}")
    assert f"\nhint: {hint}" in errors
    assert answer["status"] == 125
    assert answer["stderr"].startswith("docker: Error response from daemon: ")
    assert errors.strip() in answer["stderr"]


@pytest.mark.parametrize("name", ["none-such", "no-spec"])
def test_a_container_without_its_gpu_does_not_start(name: str, refused: dict[str, Any]) -> None:
    """A job that silently runs without its GPU computes for days on a CPU."""
    assert not refused[name]["started"]
    assert refused[name]["stdout"] == ""
    assert refused[name]["state"] == "created"


@pytest.mark.parametrize("name", ["good", "plain"])
def test_the_same_container_starts_when_its_request_can_be_met(
    name: str, refused: dict[str, Any]
) -> None:
    """What refuses one must not touch the others: a GPU that is there, and no GPU at all."""
    answer = refused[name]
    assert answer["status"] == 0, answer["stderr"]
    assert answer["started"]
    assert answer["stdout"] == "ran\n"
    assert answer["state"] == "exited"


def test_exec_and_restart_keep_the_gpu() -> None:
    """On a restart the hook finds its own work in the container's root, and adds nothing."""
    found = seen.play("docker-life", "2")
    before, after = (seen.Seen.parse(found[when]) for when in ("before", "after"))
    seen.assert_granted(before, {2}, found["host"])
    seen.assert_driver(before)
    assert after == before
    assert "C /etc/ld.so.cache" in found["changed before"]
    assert sorted(found["changed after"]) == sorted(found["changed before"])


def test_nothing_is_left_when_the_test_itself_is_killed() -> None:
    """A cancelled CI job leaves a daemon, a container and their cgroups, if nobody cares."""
    before = machine.of_machine()
    host = subprocess.Popen(
        seen.command("docker-waits", "1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    try:
        namespace = json.loads(host.stdout.readline())["namespace"]
        groups = machine.groups_of(host.pid)
        running = machine.processes_in(namespace)
    finally:
        host.kill()
        host.wait()
        host.stdout.close()
    assert groups
    # Supervisor's child, scenario, dockerd, containerd, and a shim at least.
    assert len(running) >= 5
    end = time.monotonic() + DEADLINE_S
    while machine.processes_in(namespace) or machine.groups_of(host.pid):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert machine.differences(before, machine.of_machine, lost=False) == []
