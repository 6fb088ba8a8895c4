# SPDX-License-Identifier: Apache-2.0
"""What a create costs that was there before, and that it comes to the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scenarios.machine import SCENARIOS, run_on_host

pytestmark = pytest.mark.system("runc")

# Of the interpreter's own start: the budgets of the start path.
WARM_LIMIT, HOOK_LIMIT = 2.0, 1.8
# System calls of all processes of one create, the interpreter's own start among them.
CALLS = {"shim": 1200, "hook": 900}
FILES = 44
CASES = (
    *("all", "two", "driver only", "all capabilities", "unknown capability", "requirement"),
    *("legacy", "cdi", "cdi, one", "cdi, driver only", "nothing"),
)
MIG_CASES = ("MIG device", "cdi, MIG device")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what all creates came to: on a host of eight GPUs, and on one with MIG devices."""
    whole = run_on_host(SCENARIOS / "start_path.py", *CASES)
    mig = run_on_host(SCENARIOS / "start_path.py", *MIG_CASES, options=("--mig", "7:2"))
    return {**whole, "cases": {**mig["cases"], **whole["cases"]}}


@pytest.mark.parametrize("name", [*CASES, *MIG_CASES])
def test_the_second_create_is_as_the_first(found: dict[str, Any], name: str) -> None:
    """Byte for byte, in config.json and in what is said; kept is what can be."""
    case = found["cases"][name]
    # The runtime that it becomes is no program.
    assert case["first"]["status"] == 126, case["first"]["said"]
    assert case["first"] == case["second"]
    assert case["hit"] is case["kept"]
    # The control: something was given, unless nothing is asked for.
    assert ("mounts" in case["first"]["config"] and "/dev/nvidia" in case["first"]["config"]) is (
        name != "nothing"
    )


@pytest.mark.parametrize("name", ["all", "cdi", "hook"])
def test_a_warm_create_keeps_its_budget(found: dict[str, Any], name: str) -> None:
    """Eight GPUs, up to the exec, or the hook's first operation, in starts of an interpreter."""
    counts = found["counts"]
    if not counts:
        pytest.skip("valgrind is not installed: instructions are not counted")
    ratio = counts[name] / counts["floor"]
    print(json.dumps({name: round(ratio, 2)}))
    assert ratio <= (HOOK_LIMIT if name == "hook" else WARM_LIMIT)


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_create_makes_few_system_calls(found: dict[str, Any], name: str) -> None:
    """What is read is read at once, and nothing is asked twice: of 44 files no more than that."""
    calls = found["calls"]
    if not calls:
        pytest.skip("valgrind is not installed: nothing is counted")
    print(json.dumps(calls))
    assert calls["files"] >= FILES
    assert calls[name] <= CALLS[name]
