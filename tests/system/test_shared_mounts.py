# SPDX-License-Identifier: Apache-2.0
"""NS-01, CG-01: containers that share mounts with the host, or may have few processes."""

from __future__ import annotations

from typing import Any

import pytest
from scenarios.machine import SCENARIOS, run_on_host

pytestmark = pytest.mark.system("runc")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return what every case came to, on one simulated host."""
    return run_on_host(SCENARIOS / "shared.py")


@pytest.mark.parametrize("case", ["shared", "rshared", "slave", "host-proc"])
def test_ns_01_no_mount_of_ours_reaches_the_host(results: dict[str, Any], case: str) -> None:
    """The mask would stay on the host, and tell every later hook that there is nothing to do."""
    seen = results[case]
    assert seen["status"] == 0, seen["output"]
    assert "ModifyDeviceFiles: 0" in seen["output"]
    assert "ModifyDeviceFiles: 1" in seen["params"]
    assert seen["mounted"] == []


def test_cg_01_the_hook_works_under_a_limit_of_eight_processes(results: dict[str, Any]) -> None:
    """The hook is in the container's cgroup, and its deadline is a thread."""
    seen = results["pids-limit"]
    assert seen["status"] == 0, seen["output"]
    assert "ModifyDeviceFiles: 0" in seen["output"]
