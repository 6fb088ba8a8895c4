# SPDX-License-Identifier: Apache-2.0
"""Hostile images under each pair of factors, and with `make test-all` under all combinations.

The factors: the low-level runtime; whether the container's ids are mapped; whether the kernel has
openat2(2); and what of the hook's own environment its spec still has. NS-04 and ENV-10 of the
attack catalogue.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import reachable
from effort import IS_FULL
from scenarios.machine import SCENARIOS, attack_names, run_on_host

pytestmark = [
    pytest.mark.system("runc", "crun", "gcc"),
    pytest.mark.catalogue("NS-04", "ENV-10", "ENV-01", "LINK-03", "LINK-04", "LINK-06"),
]
FACTORS = {
    "runtime": ("runc", "crun"),
    "user": ("root", "userns"),
    "openat2": ("openat2", "ENOSYS"),
    "env": ("absent", "[]", "set"),
}
PAIRWISE = (
    ("runc", "root", "openat2", "absent"),
    ("crun", "userns", "ENOSYS", "absent"),
    ("runc", "userns", "ENOSYS", "[]"),
    ("crun", "root", "openat2", "[]"),
    ("runc", "root", "ENOSYS", "set"),
    ("crun", "userns", "openat2", "set"),
)
ROWS = tuple(itertools.product(*FACTORS.values())) if IS_FULL else PAIRWISE
# In the full matrix every image alone as well.
ATTACKS = (
    ["together", *(n for n in attack_names() if n.startswith(("env", "link"))), "special_no_etc"]
    if IS_FULL
    else ["together"]
)
# The work is done elsewhere in the image, or its loader needs no cache.
ELSEWHERE = {
    *("link_01_usr_lib_absolute", "link_02_library_directory_climbs"),
    "link_03_etc_is_a_link",
}


def columns(row: tuple[str, ...]) -> Any:
    """Return *row* as a parameter."""
    needs = [reachable.by_others] if row[1] == "userns" else []
    return pytest.param(row, id=",".join(row), marks=needs)


def pairs(rows: Any) -> set[tuple[Any, ...]]:
    """Return the pairs of two factors' values that *rows* have."""
    return {
        ((i, row[i]), (j, row[j]))
        for row in rows
        for i, j in itertools.combinations(range(len(row)), 2)
    }


@pytest.fixture(scope="module", params=list(map(columns, ROWS)))
def row(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return one combination."""
    values: tuple[str, ...] = request.param
    return values


@pytest.fixture(scope="module")
def seen(row: tuple[str, ...]) -> dict[str, Any]:
    """Return what every image came to in it, on a simulated host of its own."""
    found = run_on_host(SCENARIOS / "matrix.py", json.dumps([row]), ",".join(ATTACKS))
    images: dict[str, Any] = found[",".join(row)]
    return images


def test_every_pair_of_factors_has_a_row(record_property: Callable[[str, object], None]) -> None:
    """A table with a hole would not show."""
    assert pairs(ROWS) == pairs(itertools.product(*FACTORS.values()))
    table = ["pairs of factors: " + ", ".join(FACTORS), *("  " + ", ".join(row) for row in ROWS)]
    for line in [*table, f"matrix: {len(ROWS)} rows, {len(ATTACKS)} images each"]:
        record_property("summary", line)


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_image_is_held(seen: dict[str, Any], row: tuple[str, ...], attack: str) -> None:
    """No code of the image runs, nothing outside changes, and the work is done."""
    came_to = seen[attack]
    assert not came_to["marked"]
    assert came_to["changed"] == []
    assert not came_to["mounts_changed"]
    assert came_to["seconds"] < 9
    if row[0] == "crun" and attack in ELSEWHERE:
        # crun does not follow them either: it refuses to start the container.
        assert came_to["status"] != 0
        assert "No such file or directory" in came_to["output"]
        return
    assert came_to["status"] == 0, came_to["output"]
    # Who may not look through /proc is not told that nothing is there: the cache stays.
    is_left = row[1] == "userns" and attack == "link_06_to_proc"
    assert came_to["work_done"] or attack in ELSEWHERE or is_left
    if row[:2] != ("crun", "userns"):
        assert "ModifyDeviceFiles: 0" in came_to["output"]


def test_control_a_weak_hook_changes_the_host(seen: dict[str, Any]) -> None:
    """A combination in which a weak hook does no harm proves nothing."""
    assert seen["control"]["changed"]
