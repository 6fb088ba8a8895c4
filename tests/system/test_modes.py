# SPDX-License-Identifier: Apache-2.0
"""The legacy mode, and the hooks of engines in every mode, in real containers by runc."""

from __future__ import annotations

import json
from typing import Any

import pytest
from containers import seen
from containers.ways import LEGACY_WAYS

pytestmark = pytest.mark.system("runc")
OURS, ENGINES = "ours", "engine's"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what the containers were, without ("ways") and with a hook of the engine's."""
    return seen.play("legacy")


def assert_called_once(calls: list[str], name: str) -> None:
    """Assert that the hook *name* has been called as a prestart hook, once."""
    assert calls[0] == f"{name} prestart"
    # As the low-level runtime gives it: one object, whatever its lines.
    state = json.loads("".join(calls[1:]))
    assert state["pid"] > 0
    assert "/bundle-" in state["bundle"]


@pytest.mark.parametrize("kind", ["ways", "engine"])
def test_a_legacy_container_has_its_devices_from_us_and_its_files_from_a_hook(
    found: dict[str, Any], kind: str
) -> None:
    """A prestart hook cannot grant a device, and two of them would mount everything twice."""
    case = found[kind]["legacy"]
    asked = seen.Seen.parse(case["output"])
    seen.assert_granted(asked, {1, 3}, found["host"], drm=False)
    seen.assert_no_driver(asked)
    ours, engines = (case["calls"][name] for name in (OURS, ENGINES))
    if kind == "ways":
        assert_called_once(ours, "ours")
        assert engines == []
    else:
        assert ours == []
        assert_called_once(engines, "nvidia-container-runtime-hook")


def test_legacy_none_is_control_nodes_and_a_hook(found: dict[str, Any]) -> None:
    """As in the other modes, the driver without a GPU."""
    case = found["ways"]["legacy, none"]
    seen.assert_granted(seen.Seen.parse(case["output"]), set(), found["host"], drm=False)
    assert_called_once(case["calls"][OURS], "ours")


@pytest.mark.parametrize("name", ["auto", "cdi"])
def test_where_we_add_the_files_the_hook_of_the_engine_does_not_run(
    found: dict[str, Any], name: str
) -> None:
    """It would inject a second time, from outside of the container."""
    case = found["engine"][name]
    assert case["calls"] == {OURS: [], ENGINES: []}
    output = {**found, "asked": case["output"]}
    seen.assert_gpu_container(output, {1, 3}, proc_driver=True)


@pytest.mark.parametrize(
    ("name", "runs"), [("unasked", False), ("legacy, unasked", True), ("legacy, none", True)]
)
def test_the_hook_of_the_engine_is_left_in_the_legacy_mode_alone(
    found: dict[str, Any], name: str, runs: bool
) -> None:
    """Also where nothing is asked for."""
    case = found["engine"][name]
    assert case["calls"][OURS] == []
    assert bool(case["calls"][ENGINES]) == runs
    if LEGACY_WAYS[name].devices is None:
        seen.assert_no_gpu(seen.Seen.parse(case["output"]))


@pytest.mark.parametrize("name", ["unasked", "legacy, unasked"])
def test_who_asks_for_nothing_gets_no_hook(found: dict[str, Any], name: str) -> None:
    """Its root must not be touched."""
    case = found["ways"][name]
    assert case["calls"] == {OURS: [], ENGINES: []}
    seen.assert_no_gpu(seen.Seen.parse(case["output"]))
