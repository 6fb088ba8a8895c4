# SPDX-License-Identifier: Apache-2.0
"""The prestart hook where our runtime is not in the path: it allows the devices in the cgroup.

By runc on cgroup version 1 and on cgroup2 alone; by crun where this machine lets it set rules.
"""

from __future__ import annotations

from typing import Any

import pytest
from containers import seen

PROGRAM = seen.HERE / "grants.py"
HINT = 'run "gpuruntime runtime configure --runtime docker --set-as-default", then restart docker'
NO_CGROUPS = '"nvidia-container-cli.no-cgroups" forbids the hook to allow it'
NAMESPACE = "a hook cannot bring it into a container with a user namespace of its own"
NUMBERS = ("195:254", "511:0", "511:1", "195:1", "195:3", "195:255")
# What systemctl would take if nobody ended it.
FOREVER_S = 60


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.system(program))
        for name, program in (
            *(("v1", "runc"), ("v2", "runc"), ("crun-v1", "crun"), ("crun-v2", "crun")),
        )
    ],
)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what every container came to."""
    found = play(request.param)
    if "RLIM_MEMLOCK" in found["control"]["error"]:
        pytest.skip("crun cannot set device rules here: it may not raise RLIMIT_MEMLOCK")
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(v, marks=pytest.mark.system("runc")) for v in ("v1", "v2")],
)
def of_systemd(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what every container in a scope of systemd came to."""
    return play(f"systemd-{request.param}")


def play(name: str) -> dict[str, Any]:
    """Return what the scenario *name* found."""
    return seen.play(name, program=PROGRAM)


def container(case: dict[str, Any]) -> seen.Seen:
    """Return what the container of *case*, which has started, saw."""
    assert case["status"] == 0, case["error"]
    assert case["mounted"] == []
    return seen.Seen.parse(case["output"])


def assert_served(look: seen.Seen, host: dict[str, list[str]]) -> None:
    """Assert that the container has two GPUs and the driver; no other GPU opens."""
    seen.assert_granted(look, {1, 3}, host, drm=False)
    seen.assert_driver(look)


def assert_refused(case: dict[str, Any], *texts: str) -> None:
    """Assert that the container has not started, and why."""
    assert case["status"] != 0
    assert case["output"] == ""
    # runc quotes it once more.
    said = case["error"].replace("\\n", "\n").replace("\\", "")
    for text in texts:
        assert text in said
    assert said.count("hint: ") == 1
    assert "Traceback" not in said
    assert case["mounted"] == []


def test_control_a_node_without_a_rule_does_not_open(found: dict[str, Any]) -> None:
    """What is bound alone is there, and the cgroup refuses it: so the hook has to do something."""
    look = container(found["control"])
    assert {"/dev/nvidia1", "/dev/nvidia3"} < set(look.opened)
    assert set(look.opened.values()) == {seen.REFUSED}
    assert set(look.made.values()) == {seen.REFUSED}


def test_the_devices_that_were_asked_for_open_and_no_others(found: dict[str, Any]) -> None:
    """Also another GPU's node, which the container makes itself, stays closed."""
    look = container(found["granted"])
    assert_served(look, found["host"])
    for path in ("/dev/nvidia1", "/dev/nvidia3"):
        assert {"nosuid", "noexec"} <= set(look.mounts[path])
        assert "nodev" not in look.mounts[path]


def test_nodes_of_the_engine_are_not_bound_again(found: dict[str, Any]) -> None:
    """`docker run --volume /dev/nvidia1:/dev/nvidia1` brings the node and no rule."""
    assert_served(container(found["node of the engine"]), found["host"])
    output = found["node of the engine"]["output"]
    assert sum(" /dev/nvidia1 " in line for line in output.splitlines() if "mount" in line) == 1


def test_where_all_is_allowed_the_nodes_are_brought(found: dict[str, Any]) -> None:
    """Then nothing has to be changed in the cgroup, whatever `no-cgroups` says."""
    for name in ("all allowed", "no-cgroups, all allowed"):
        look = container(found[name])
        assert set(look.opened.values()) == {seen.ALLOWED}
        assert {path for path in look.nodes if path[-1].isdigit() and "nvidia" in path} == {
            "/dev/nvidia1",
            "/dev/nvidia3",
        }


def test_no_cgroups_is_a_failure_before_the_start(found: dict[str, Any]) -> None:
    """A container that cannot open its GPU must not run."""
    hint = 'run "gpuruntime config --set nvidia-container-cli.no-cgroups=false --in-place"'
    assert_refused(found["no-cgroups"], "device: the container may not use", NO_CGROUPS, hint)


def test_a_second_hook_allows_the_same(found: dict[str, Any]) -> None:
    """An engine and a directory of hooks may each have put it there."""
    assert_served(container(found["twice"]), found["host"])


def test_new_limits_take_no_device_away(found: dict[str, Any]) -> None:
    """`docker update` has the low-level runtime write the cgroup, but for its device rules."""
    before, after = (seen.Seen.parse(found["life"][when]) for when in ("before", "updated"))
    assert_served(before, found["host"])
    assert after == before


@pytest.mark.system("runc")
@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("v1", "devices.allow: Operation not permitted; the cgroup above it does not allow them"),
        ("v2", "the device program that is attached there cannot be extended: it calls functions"),
    ],
)
def test_what_cannot_be_allowed_is_a_failure_before_the_start(version: str, why: str) -> None:
    """With the reason, and the way that needs no such change."""
    found = play(f"refused-{version}")
    assert_refused(found["cgroup"], "device: cannot allow c 195:254, ", why, HINT)
    # The /dev of a user namespace of its own takes no file of ours.
    assert_refused(found["mapped"], "device: the container may not use", NAMESPACE, HINT)


@pytest.mark.system("crun")
def test_the_engine_s_own_cgroup_is_never_changed() -> None:
    """Where a container has none of its own, all that the engine runs would get the device."""
    found = play("engine")
    assert_refused(found["case"], "device: cannot allow devices", "the engine is in", HINT)
    assert found["rules after"] == found["rules before"]


@pytest.mark.system("runc", "unshare")
@pytest.mark.parametrize("name", ["usual", "no-cgroups"])
def test_b020_where_the_engine_is_in_a_user_namespace_nodes_are_enough(name: str) -> None:
    """No low-level runtime can set rules there, and none of ours have to be."""
    look = container(play("rootless")[name])
    gpus = {path for path in look.nodes if "nvidia" in path and path[-1].isdigit()}
    assert gpus == {"/dev/nvidia1", "/dev/nvidia3"}
    assert set(look.opened.values()) == {seen.ALLOWED}
    assert set(look.made.values()) == {seen.NOT_MADE}
    seen.assert_driver(look)


def test_systemd_is_told_first(of_systemd: dict[str, Any]) -> None:
    """By the numbers, without the engine's environment, and not in the container's mounts."""
    assert_served(container(of_systemd["told"]), of_systemd["host"])
    program, *words = of_systemd["called"][: of_systemd["called"].index("")]
    assert program == "/usr/bin/systemctl"
    assert words == [
        *("set-property", "--runtime", "--", of_systemd["unit"]),
        *(f"DeviceAllow=/dev/char/{numbers} rw" for numbers in NUMBERS),
    ]
    *environment, namespace = of_systemd["called"][len(words) + 2 :]
    assert {line for line in environment if not line.startswith(("PWD=", "SHLVL=", "_="))} == {
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL=C.UTF-8",
    }
    assert namespace == of_systemd["namespace of the host"]


def test_of_a_cgroup_below_a_scope_systemd_is_told_too(of_systemd: dict[str, Any]) -> None:
    """As crun makes one for the container; systemd sets rules for the scope above it."""
    assert_served(container(of_systemd["below"]), of_systemd["host"])
    assert of_systemd["unit below"] in of_systemd["called below"]


def test_systemd_is_not_told_of_what_it_does_not_refuse(of_systemd: dict[str, Any]) -> None:
    """A first rule would have it refuse all other devices; crun sets none for its scopes."""
    for name in ("no rules", "no scope", "not booted"):
        assert_served(container(of_systemd[name]), of_systemd["host"])
    assert of_systemd["not called"]


def test_a_systemd_that_refuses_is_a_failure_before_the_start(of_systemd: dict[str, Any]) -> None:
    """It would take the device away again, at its next reload."""
    said = '"/usr/bin/systemctl set-property": Failed to set unit properties: Unit not loaded.'
    assert_refused(of_systemd["refused"], said, HINT)
    assert_refused(of_systemd["no systemctl"], "there is no /usr/bin/systemctl", HINT)


def test_a_systemd_that_does_not_answer_is_given_up(of_systemd: dict[str, Any]) -> None:
    """And is named, because it has less than all the time there is."""
    assert_refused(
        of_systemd["late"], '/usr/bin/systemctl set-property" did not answer in time', HINT
    )
    assert of_systemd["late after"] < FOREVER_S
    assert of_systemd["left of it"] == []


@pytest.mark.system("runc")
def test_what_systemd_attaches_is_left_to_it() -> None:
    """It replaces its own program later, and could not detach another in its place."""
    found = play("systemd-v2")["attached"]
    assert len(found["ids"]) == 2
    assert found["of systemd"] in found["ids"]
