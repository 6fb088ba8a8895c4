# SPDX-License-Identifier: Apache-2.0
"""JSON-09: what our reader accepts, runc and crun read as we do, or not at all.

Real containers say what they see of their config: environment, nodes, mounts, capabilities, hooks.
"""

from __future__ import annotations

from typing import Any

import pytest
from scenarios.machine import SCENARIOS, run_on_host

RUNTIMES = ("runc", "crun")
pytestmark = [pytest.mark.system(*RUNTIMES), pytest.mark.catalogue("JSON-09")]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return what each reader saw of each config."""
    return run_on_host(SCENARIOS / "readers.py")


def differences(views: dict[str, Any]) -> list[str]:
    """Return the runtimes that start a container which is not what we read."""
    return [name for name in RUNTIMES if views[name] is not None and views[name] != views["ours"]]


def test_what_is_accepted_is_read_in_one_way(results: dict[str, Any]) -> None:
    """Else we would add a GPU to one container, and another one would start."""
    accepted = {name: views for name, views in results.items() if views["accepted"]}
    assert {name: views for name, views in accepted.items() if differences(views)} == {}
    # Not by refusing all: those that start show something.
    for runtime in RUNTIMES:
        assert sum(views[runtime] is not None for views in accepted.values()) > 15
    assert accepted["as it is"]["ours"]["hooks"] == ["one", "two"]
    assert sum(name.startswith("random") for name in accepted) > 15


@pytest.mark.parametrize(
    "name",
    [
        *("first hooks", "last Hooks", "first \\u0068ooks", "first hooks\\u0000"),
        *("named hook\\u017f", "named hoo\\u212as", "named hooks\\u0000"),
        *("last PROCESS", "last Linux", "process first env", "process first capabilities"),
        *("mounts twice", "value with NUL", "value of no UTF-8", "garbage behind"),
    ],
)
def test_control_a_reader_that_asks_nothing_is_wrong(results: dict[str, Any], name: str) -> None:
    """Python's own, of the same bytes: a runtime starts another container, or it reads none."""
    views = results[name]
    assert not views["accepted"]
    assert differences(views)
