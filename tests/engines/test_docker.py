# SPDX-License-Identifier: Apache-2.0
"""A real dockerd with our runtime by path: containers, errors, restart, a killed test."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest
import reachable
from containers import machine, seen
from containers.ways import DOCKER, FEW, WAYS

pytestmark = pytest.mark.engine("dockerd", "docker", "containerd", "runc")

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def of_v2() -> dict[str, Any]:
    """Return the results of the containers of a dockerd on cgroup2."""
    return seen.play("docker-v2")


@pytest.fixture(scope="module")
def remapped() -> dict[str, Any]:
    """Return the results of the containers of a dockerd that maps their ids."""
    return seen.play("docker-remapped")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the results of all containers of one dockerd, including refused requests."""
    return seen.play("docker")


@pytest.mark.parametrize("name", DOCKER)
def test_a_docker_container_has_the_gpus_it_asked_for_and_no_other(
    results: dict[str, Any], name: str
) -> None:
    """`docker run --runtime` is the most common use of our runtime."""
    seen.assert_way(results, name, WAYS[name])


@pytest.mark.parametrize("name", FEW)
def test_a_docker_container_on_cgroup_v2_has_the_gpus_it_asked_for_and_no_other(
    of_v2: dict[str, Any], name: str
) -> None:
    """With cgroup v2, a BPF program decides on each open."""
    seen.assert_way(of_v2, name, WAYS[name])


@reachable.by_others
@pytest.mark.parametrize("name", FEW)
def test_a_docker_container_with_ids_of_its_own_has_the_gpus_it_asked_for_and_no_other(
    remapped: dict[str, Any], name: str
) -> None:
    """`userns-remap`: our hook has no privileges on the host, and must reach the container."""
    seen.assert_way(remapped, name, WAYS[name], mapped=True)


@reachable.by_others
def test_a_docker_container_may_have_the_host_s_ids_all_the_same(remapped: dict[str, Any]) -> None:
    """`--userns=host` on a daemon that maps ids."""
    container = seen.Seen.parse(remapped["of the host"])
    seen.assert_granted(container, {1, 3}, remapped["host"])
    seen.assert_driver(container)


@pytest.mark.parametrize(
    ("name", "gpus"), [("by default", {1, 3}), ("gpus", set(range(8))), ("read-only", {1, 3})]
)
def test_a_docker_container_with_other_options_has_its_gpus(
    name: str, gpus: set[int], results: dict[str, Any]
) -> None:
    """By the default runtime, with two request forms at once, on a read-only root."""
    container = seen.Seen.parse(results["options"][name])
    seen.assert_granted(container, gpus, results["host"])
    seen.assert_driver(container)
    assert ("ro" in container.mounts["/"]) == (name == "read-only")


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [
        ("auto", {"compute", "utility"}),
        ("auto, every capability", set(seen.LIBRARY_OF)),
        ("cdi", set(seen.LIBRARY_OF)),
    ],
)
def test_a_docker_container_has_the_libraries_of_its_driver_capabilities(
    results: dict[str, Any], name: str, capabilities: set[str]
) -> None:
    """Users of graphics images set `--env NVIDIA_DRIVER_CAPABILITIES`."""
    assert seen.files_for(seen.Seen.parse(results["ways"][name])) == capabilities


def test_docker_s_own_option_asks_through_us(results: dict[str, Any]) -> None:
    """`--gpus` sets the variable and adds a hook, which our runtime removes as unnecessary."""
    case = results["gpus"]["auto"]
    assert case["calls"] == []
    container = seen.Seen.parse(case["output"])
    seen.assert_granted(container, {1, 3}, results["host"])
    seen.assert_driver(container)


@pytest.mark.parametrize("case", [("legacy",), ("gpus", "legacy")])
def test_the_legacy_mode_gives_docker_containers_devices_and_one_hook(
    results: dict[str, Any], case: tuple[str, ...]
) -> None:
    """Our hook, or the hook of `--gpus`, which is not changed."""
    result = results
    for name in case:
        result = result[name]
    seen.assert_granted(seen.Seen.parse(result["output"]), {1, 3}, results["host"], drm=False)
    assert [line for line in result["calls"] if line.endswith("prestart")] == [
        "nvidia-container-runtime-hook prestart"
    ]


def test_docker_s_own_option_has_its_files_from_our_hook(results: dict[str, Any]) -> None:
    """With our runtime as the default, in the legacy mode: the runtime grants, the hook mounts."""
    container = seen.Seen.parse(results["our hook"])
    seen.assert_granted(container, {1, 3}, results["host"], drm=False)
    seen.assert_driver(container)
    assert seen.files_for(container) == {"compute", "utility"}


@pytest.fixture(params=["v1", "v2"])
def by_runc(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the containers by plain runc, with the host's nodes, on a version of cgroups."""
    name = {"v1": "results", "v2": "of_v2"}[request.param]
    of_version: dict[str, Any] = request.getfixturevalue(name)
    return {**of_version["by runc"], "host": of_version["host"]}


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("two", {1, 3}),
        ("all", set(range(8))),
        ("exec", {1, 3}),
        ("updated", {1, 3}),
        ("restarted", {1, 3}),
    ],
)
def test_docker_s_own_option_works_without_our_runtime(
    by_runc: dict[str, Any], name: str, gpus: set[int]
) -> None:
    """`docker run --gpus` on a fresh installation; other GPUs stay closed, limits may change."""
    container = seen.Seen.parse(by_runc[name])
    seen.assert_granted(container, gpus, by_runc["host"], drm=False)
    seen.assert_driver(container)
    assert seen.files_for(container) == {"compute", "utility"}


def test_control_docker_and_runc_alone_open_no_gpu(by_runc: dict[str, Any]) -> None:
    """The node exists, and the cgroup refuses it."""
    assert seen.Seen.parse(by_runc["control"]).opened == {"/dev/nvidia1": seen.REFUSED}


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("none-such", 'device: there is no device "9"; available devices: 0, 1, ', "list the"),
        (
            "none-such-spec",
            'device: no CDI spec in "/etc/cdi", "/var/run/cdi" defines',
            "request one of",
        ),
        ("no-spec", "device: no CDI spec found in", 'run "gpuruntime cdi generate'),
        (
            "requirement",
            "requirement: requirements not met: unsatisfied condition: cuda>=99.0 (cuda=12.4)",
            "run the container with NVIDIA_DISABLE_REQUIRE=1",
        ),
    ],
)
def test_docker_s_error_is_our_text(
    name: str, message: str, hint: str, results: dict[str, Any]
) -> None:
    """The user of an engine never sees the stderr of the runtime: the log record contains it."""
    result = results["refused"][name]
    status, _, errors = result["direct"]
    assert status == 1
    assert errors.count("\n") == 2
    assert errors.startswith(f"gpu-container-runtime: {message}")
    assert f"\nhint: {hint}" in errors
    assert result["status"] == 125
    assert result["stderr"].startswith("docker: Error response from daemon: ")
    assert errors.strip() in result["stderr"]


@pytest.mark.parametrize("name", ["none-such", "none-such-spec", "no-spec", "requirement"])
def test_a_container_without_its_gpu_does_not_start(name: str, results: dict[str, Any]) -> None:
    """A job that silently runs without its GPU computes for days on a CPU."""
    result = results["refused"][name]
    assert not result["started"]
    assert result["stdout"] == ""
    assert result["state"] == "created"


@pytest.mark.parametrize("name", ["good", "plain"])
def test_the_same_container_starts_when_its_request_can_be_met(
    name: str, results: dict[str, Any]
) -> None:
    """A refusal does not affect other containers, with an existing GPU or without one."""
    result = results["refused"][name]
    assert result["status"] == 0, result["stderr"]
    assert result["started"]
    assert result["stdout"] == "ran\n"
    assert result["state"] == "exited"


def test_exec_and_restart_keep_the_gpu(results: dict[str, Any]) -> None:
    """On a restart the hook finds its own files in the root of the container, and adds nothing."""
    before, after = (seen.Seen.parse(results["life"][when]) for when in ("before", "after"))
    seen.assert_granted(before, {2}, results["host"])
    seen.assert_driver(before)
    assert after == before
    changed = results["life"]["changed before"]
    assert "C /etc/ld.so.cache" in changed
    assert sorted(results["life"]["changed after"]) == sorted(changed)


def test_new_limits_take_no_gpu_away(results: dict[str, Any]) -> None:
    """`docker update` makes the low-level runtime write the cgroup again."""
    before, after = (seen.Seen.parse(results["life"][when]) for when in ("after", "updated"))
    seen.assert_granted(after, {2}, results["host"])
    assert after == before


def test_nothing_is_left_when_the_test_itself_is_killed() -> None:
    """A cancelled CI job must not leave a daemon, a container or their cgroups."""
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
    # At least the child of the supervisor, scenario, dockerd, containerd and a shim.
    assert len(running) >= 5
    end = time.monotonic() + DEADLINE_S
    while machine.processes_in(namespace) or machine.groups_of(host.pid):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert machine.differences(before, machine.of_machine, lost=False) == []
