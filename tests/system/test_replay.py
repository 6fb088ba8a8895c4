# SPDX-License-Identifier: Apache-2.0
"""Creates that the launcher answers by itself, on the simulated host."""

from __future__ import annotations

from typing import Any

import pytest
from scenarios.machine import SCENARIOS, run_on_host

pytestmark = pytest.mark.system("runc")

ENGINES = ("containerd", "cri", "docker", "podman")
CHANGES = (
    *("mode of a node", "owner of a node", "a node more", "a node fewer", "a channel"),
    *("a library more", "another libcuda", "another loader cache", "another hook"),
    *("mode of the hook", "config"),
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what came of all creates."""
    return run_on_host(SCENARIOS / "replay.py")


@pytest.mark.parametrize("devices", ["all", "0,1", "none"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_second_create_needs_no_python(
    found: dict[str, Any], engine: str, devices: str
) -> None:
    """And leaves the same bytes, whatever engine wrote what was there."""
    case = found["engines"][f"{engine} {devices}"]
    assert case == {"same": True, "status": 0, "changed": True}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_on_the_host_is_seen(found: dict[str, Any], change: str) -> None:
    """Python is asked once more; then there is an answer for the host as it is."""
    case = found["changes"][change]
    assert case == {"before": 0, "refused": True, "python": 0, "same": True}
