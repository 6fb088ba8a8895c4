# SPDX-License-Identifier: Apache-2.0
"""The inventory's snapshot: used while it fits, made once, not believed blindly.

Each create is one of our runtime on the simulated host; `asked` is how often NVML was loaded.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from containers import seen

pytestmark = pytest.mark.system("runc")

PROGRAM = seen.HERE / "snapshot.py"
# As in creates.py, and what a busy machine adds to it.
DEADLINE_S = 2
GRACE_S = 2.5
PATIENCE_S = 3
LATE = re.compile(
    r'gpu-container-runtime: initialization: the driver did not answer in 2 s(: ".+")?'
)
GPUS = [f"/dev/nvidia{index}" for index in range(8)]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> Found:
    """Return what all creates came to, on one host."""
    return seen.play("snapshot", program=PROGRAM)


@pytest.fixture(scope="module")
def mig() -> Found:
    """Return what creates for MIG devices came to."""
    return seen.play("mig", program=PROGRAM, host=("--mig", "0:2"))


def gpus(call: Found) -> list[str]:
    """Return the nodes of GPUs in the config.json that the low-level runtime got."""
    return [path for path in GPUS if path in call["devices"]]


def assert_given(call: Found, *indices: int) -> None:
    """Assert that the container starts, and has these GPUs."""
    assert call["status"] == 0, call["stderr"]
    assert call["started"]
    assert gpus(call) == [f"/dev/nvidia{index}" for index in indices]


def assert_refused(call: Found, text: str | re.Pattern[str]) -> None:
    """Assert that the container does not start, and why."""
    assert call["status"] == 1
    assert re.search(text, call["stderr"]), call["stderr"]
    assert "\nhint: " in call["stderr"]
    assert (call["started"], call["untouched"]) == (False, True)


def test_only_the_first_create_asks_the_driver(found: Found) -> None:
    """With a driver that fails or hangs from then on, as long as the host looks the same."""
    warm = found["warm"]
    assert_given(warm["cold"], 1)
    assert warm["cold"]["asked"] == 1
    for name, indices in (
        ("warm", (0, 2)),
        ("fault init-fails", range(8)),
        ("fault init-hangs", range(8)),
    ):
        assert_given(warm[name], *indices)
        assert (warm[name]["asked"], warm[name]["made"]) == (0, warm["cold"]["made"])
    assert warm["modes"] == ["0o40755", "0o100644"]


def test_neither_lock_nor_snapshot_is_open_in_the_low_level_runtime(found: Found) -> None:
    """It has the same descriptors, whatever we had to look at."""
    warm = found["warm"]
    plain = [line for line in warm["no GPU"]["descriptors"] if "/started/" not in line]
    assert plain
    for name in ("cold", "warm"):
        assert [line for line in warm[name]["descriptors"] if "/started/" not in line] == plain


@pytest.mark.parametrize("name", ["mode of a node", "loader cache", "GPU gone", "driver root"])
def test_a_change_of_the_host_makes_another_snapshot(found: Found, name: str) -> None:
    """Once: then that fits. Each fact by itself is in test_fingerprint.py."""
    case = found["changes"][name]
    before, after, again = case["before"], case["after"], case["again"]
    for call in (before, after, again):
        assert_given(call, 1)
    assert [call["asked"] for call in (before, after, again)] == [0, 1, 0]
    assert before["made"] != after["made"] == again["made"]


def test_another_config_file_is_no_other_host(found: Found) -> None:
    """The control: not everything that changes is a reason to ask the driver."""
    assert found["changes"]["config"]["after"]["asked"] == 0
    assert found["changes"]["back"]["asked"] == 1


def test_creates_at_once_ask_the_driver_once(found: Found) -> None:
    """A node that comes up starts all its pods at the same time."""
    case = found["at_once"]
    for call in case["calls"]:
        assert_given(call, 1)
    assert len(case["calls"]) == 6
    assert case["asked"] == 1
    assert len({call["made"] for call in case["calls"]}) == 1


def test_a_driver_that_does_not_answer_is_an_error_in_time(found: Found) -> None:
    """start-path.md 4: the text, exit 1, no container."""
    for name in ("first", "of another host"):
        call = found["hangs"][name]
        assert_refused(call, LATE)
        assert DEADLINE_S <= call["seconds"] < DEADLINE_S + GRACE_S
        assert call["asked"] == 1


def test_who_waits_for_another_waits_no_longer_than_the_driver_may_take(found: Found) -> None:
    """And asks nobody again: the time of one is not added to that of the other."""
    hangs = found["hangs"]
    for call in (hangs["late"], *hangs["four"]):
        assert_refused(call, LATE)
        assert call["seconds"] < DEADLINE_S + GRACE_S
    assert hangs["late"]["seconds"] < DEADLINE_S
    assert (hangs["asked for both"], hangs["asked for four"]) == (1, 1)


def test_a_failure_is_remembered_while_the_host_is_the_same(found: Found) -> None:
    """A storm of creates does not queue; whoever repairs the driver need not wait."""
    for case in (found["hangs"], found["fails"]):
        call = case["at once after"]
        assert_refused(call, r"s ago; tried again after 5 s\)")
        assert call["seconds"] < DEADLINE_S / 2
        assert call["asked"] == 0
    assert_refused(found["fails"]["first"], "Driver Not Loaded")
    assert_refused(found["fails"]["still"], "Driver Not Loaded")
    assert found["fails"]["still"]["asked"] == 0
    for call in (found["fails"]["of another host"], found["hangs"]["well again"]):
        assert_given(call, 1)
        assert call["asked"] == 1


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse")
def test_a_child_that_cannot_be_killed_is_left_to_die(found: Found) -> None:
    """In a driver in trouble, no signal ends a process."""
    case = found["unkillable"]
    # The control: it is there still.
    assert len(case["left"]) == 1
    assert_refused(case["first"], LATE)
    assert case["first"]["seconds"] < DEADLINE_S + GRACE_S
    assert_refused(case["at once after"], r"s ago; tried again after 5 s\)")


def test_who_asks_for_no_gpu_waits_for_nothing(found: Found) -> None:
    """While somebody has the lock and asks a driver that hangs, as after it."""
    held = found["held"]
    for call in (*held["no GPU"], *found["hangs"]["no GPU"], found["health"]["no GPU"]):
        assert_given(call)
        assert call["untouched"]
        assert call["seconds"] < DEADLINE_S / 2
        assert call["asked"] == 0
    assert held["same"]


def test_a_snapshot_that_fits_is_read_without_the_lock(found: Found) -> None:
    """The control is one without a snapshot, which waits."""
    held = found["held"]
    assert_given(held["warm"], 1)
    assert held["warm"]["seconds"] < DEADLINE_S / 2
    assert held["cold"]["seconds"] >= PATIENCE_S


def test_nobody_waits_long_for_a_create_that_gets_no_time(found: Found) -> None:
    """It holds the lock; another asks itself after a while, and the next has its answer."""
    held = found["held"]
    assert_given(held["cold"], 1)
    assert held["cold"]["asked"] == 1
    assert held["cold"]["seconds"] < PATIENCE_S + GRACE_S
    assert_given(held["next"], 2)
    assert (held["next"]["asked"], held["next"]["made"]) == (0, held["cold"]["made"])


def test_what_few_descriptors_let_a_create_see_is_kept_for_no_other(found: Found) -> None:
    """Neither what it was given nor how it failed."""
    short = found["short"]
    for name in ("few", "many"):
        assert_given(short[name], *range(8))
        assert short[name]["asked"] == 1
    assert not {"inventory.json", "inventory.failure", "ready.json"} & set(short["kept"])
    assert_refused(short["fails"], "Driver Not Loaded")
    assert_given(short["well again"], 1)


def test_a_child_that_was_killed_is_no_failure_of_the_driver(found: Found) -> None:
    """The memory limit of one container must not keep the next from starting."""
    killed = found["killed"]
    assert_refused(killed["first"], "signal 9")
    assert "inventory.failure" not in killed["kept"]
    assert_given(killed["well again"], 1)


def test_the_lie_of_a_trusted_snapshot_is_believed(found: Found) -> None:
    """The control of the next test: the file is what decides."""
    assert_given(found["trust"]["trusted"]["first"], 2)


@pytest.mark.parametrize("name", ["owner", "link", "garbage", "failure"])
def test_a_snapshot_that_is_not_ours_is_made_anew(found: Found, name: str) -> None:
    """Who could write it could give any device of the host to any container.

    Every way in which it can be wrong is in test_inventory_snapshot.py.
    """
    case = found["trust"][name]
    for call, asked in ((case["first"], 1), (case["second"], 0)):
        assert_given(call, 1)
        assert call["asked"] == asked
        assert call["made"] not in ("poison", None)
        assert "warning" not in call["log"]


@pytest.mark.parametrize(
    ("name", "asked"),
    # What was given can be kept without the snapshot.
    [("directory", [1, 0]), ("directory of others", [1, 1])],
)
def test_where_no_snapshot_can_be_kept_none_is_used(
    found: Found, name: str, asked: list[int]
) -> None:
    """A directory in its place, and a directory that others may write to."""
    calls = found["trust"][name].values()
    for call in calls:
        assert_given(call, 1)
    assert [call["asked"] for call in calls] == asked


def test_nowhere_to_keep_a_snapshot_costs_time_only(found: Found) -> None:
    """On a read-only /run each create asks; a directory that is not there is made."""
    unwritable = found["unwritable"]
    for call in (*unwritable["read-only"], *unwritable["no directory"]):
        assert_given(call, 1)
        assert (call["asked"], call["made"]) == (1, None)
    first, second = unwritable["new directory"]
    assert (first["asked"], second["asked"]) == (1, 0)


def test_health_asks_the_driver_at_each_create(found: Found) -> None:
    """A GPU that fell off the bus is seen by nothing cheaper."""
    health = found["health"]
    for call in health["calls"]:
        assert_given(call, 1)
        assert call["asked"] == 1
    assert_refused(health["fails"], "Driver Not Loaded")


def test_mig_devices_are_asked_for_each_time(mig: Found) -> None:
    """They can be made again with the same ids and other UUIDs, and nothing cheap tells."""
    old, _ = mig["uuids"]
    assert (mig["1"]["asked"], mig["full GPU"]["asked"]) == (1, 0)
    for name in (old, "0:0", "new after"):
        call = mig[name]
        assert call["asked"] == 1
        assert_given(call, 0)
        assert sum("nvidia-cap" in path for path in call["devices"]) == 2
    assert_refused(mig["old after"], re.escape(f'there is no device "{old}"'))
    assert mig["full GPU after"]["asked"] == 0


def test_creates_at_once_for_mig_devices_share_an_answer(mig: Found) -> None:
    """One that was asked for after they began: the first create's own is too old for the rest."""
    for call in mig["at once"]:
        assert_given(call, 0)
    assert mig["asked at once"] <= 2
