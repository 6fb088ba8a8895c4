# SPDX-License-Identifier: Apache-2.0
"""GPU nodes in containers of runc and crun whose ids are mapped: the right ones, or none."""

from __future__ import annotations

from typing import Any

import pytest
from containers import seen

ALLOWED = "No such device or address"
# 195:3, as `stat -c %t:%T` prints it.
WANTED = "c3:3"
OVERFLOW = "65534:65534"
Found = dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("runc", marks=pytest.mark.system("runc")),
        pytest.param("crun", marks=pytest.mark.system("runc", "crun")),
    ],
)
def found(request: pytest.FixtureRequest) -> Found:
    """Return what every case came to, all on one simulated host."""
    program = seen.HERE / "user_namespaces.py"
    result = seen.play(request.param, program=program, host=("--gpus", "4"))
    return {**result, "lowlevel": request.param}


def lines(case: Found, word: str) -> list[list[str]]:
    """Return the lines that begin with *word*, split, of the container of *case*."""
    rows = [line.split(" ", 2) for line in case["output"]]
    return [row[1:] for row in rows if row[0] == word]


def assert_given(case: Found, path: str) -> list[str]:
    """Assert that the container has GPU 3 at *path* and no other; return mode and owner."""
    assert case["status"] == 0, case["error"]
    [[seen_path, facts]] = lines(case, "node")
    numbers, mode, owner = facts.split(" ")
    assert (seen_path, numbers) == (path, WANTED)
    [[_, answer]] = lines(case, "open")
    assert answer.endswith(ALLOWED)
    return [mode, owner]


@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("swapped", "/dev/nvidia0"),
        ("swapped, keep-id", "/dev/nvidia0"),
        ("swapped, listed", "/dev/nvidia0"),
        ("moved", "/dev/nvidia9"),
    ],
)
def test_the_node_under_another_name_is_the_hosts_own(found: Found, case: str, path: str) -> None:
    """B075: also where the engine's config has a device at that path, which would lie on top."""
    assert assert_given(found[case], path) == ["666", OVERFLOW]
    [[point, options]] = lines(found[case], "mount")
    assert point == path
    # crun binds what it has opened outside of the namespace, and forgets the options.
    if found["lowlevel"] == "runc":
        assert {"nosuid", "noexec"} <= set(options.split(","))


def test_the_same_config_without_us_gives_the_wrong_device(found: Found) -> None:
    """The control: runc takes the host's node of the container's path, whatever the numbers."""
    control = found["control"]
    assert control["status"] == 0, control["error"]
    [[path, facts]] = lines(control, "node")
    # crun makes a node where it may, and binds that one.
    numbers = "c3:0" if found["lowlevel"] == "runc" else WANTED
    assert (path, facts.split(" ")[0]) == ("/dev/nvidia0", numbers)


def test_a_runtime_within_a_user_namespace_binds_too(found: Found) -> None:
    """B002, B019, B020, B077: no setting tells us, and the config says nothing of it."""
    assert assert_given(found["swapped, nested"], "/dev/nvidia0") == ["666", "0:0"]
    assert len(lines(found["swapped, nested"], "mount")) == 1


def test_a_node_of_its_usual_name_is_left_to_the_low_level_runtime(found: Found) -> None:
    """There it does the right thing, and a config with devices is what others read."""
    assert_given(found["usual"], "/dev/nvidia3")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("swapped", "/dev/nvidia0"),
        ("moved", "/dev/nvidia9"),
        ("usual", "/dev/nvidia3"),
        ("false", "/dev/nvidia0"),
    ],
)
def test_without_a_user_namespace_nodes_are_made(found: Found, name: str, path: str) -> None:
    """As ever: nothing is bound, and numbers given in the spec stand."""
    case = found[f"{name}, no ids mapped"]
    assert assert_given(case, path) == ["666", "0:0"]
    assert lines(case, "mount") == []


def test_a_device_that_the_host_has_not_is_an_error_of_ours(found: Found) -> None:
    """Not the device that is at its path."""
    case = found["false"]
    assert (case["status"], case["output"]) == (1, [])
    assert '"/dev/nvidia0" is not device c 195:3' in case["error"]
    assert "user namespace" in case["error"]


def test_req_09_a_node_that_vanishes_is_an_error_before_the_start(found: Found) -> None:
    """Between our look at it and the low-level runtime's."""
    case = found["moved, removed"]
    assert case["status"] != 0
    assert case["output"] == []
    assert "driver/dev/nvidia3" in case["error"]
    assert "No such file or directory" in case["error"]


def test_req_10_a_user_namespace_without_root_is_refused_or_right(found: Found) -> None:
    """By runc, and by crun."""
    case = found["swapped, no root"]
    if case["status"] == 0:
        assert_given(case, "/dev/nvidia0")
    else:
        assert case["output"] == []
        assert "mapping" in case["error"]


def test_req_10_the_hosts_nodes_keep_numbers_mode_and_owner(found: Found) -> None:
    """They are bound, and what a container does to them would be done to the host."""
    assert found["before"] == found["host"]
    assert found["host"]["/dev/nvidia3"] == ["195:3", "666", "0:0"]


@pytest.mark.parametrize("case", ["swapped", "moved", "usual", "usual, no ids mapped"])
def test_req_07_the_cgroup_allows_one_device_more(found: Found, case: str) -> None:
    """The kernel's own list: one minor, to read and write, and all that was there before."""
    plain = set(found["plain"]["rules"])
    if not plain:
        pytest.skip("no devices controller of cgroup version 1 on this machine")
    assert "a *:* rwm" not in plain
    rules = set(found[case]["rules"])
    assert rules - plain == {"c 195:3 rw"}
    assert plain - rules == set()
