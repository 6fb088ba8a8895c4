# SPDX-License-Identifier: Apache-2.0
"""Every conformance case by its name; docs/reference/conformance.md lists the deviations."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conformance import cases

CORPUS = Path(__file__).parents[1] / "data" / "cdi"
CASES = cases.read(CORPUS)


@pytest.mark.conformance
@pytest.mark.parametrize("name", CASES)
def test_a_case_ends_as_with_the_reference(name: str) -> None:
    """The loaded specs, the registry, the resulting config or file, or the error."""
    cases.run(CASES[name])


def test_the_whole_corpus_is_there() -> None:
    """Missing cases would pass unnoticed."""
    assert len(CASES) == 527
    assert {case["op"] for case in CASES.values()} == set(cases.OPERATIONS)


def spoiled(case: dict[str, Any]) -> dict[str, Any]:
    """Return *case* with a wrong expectation."""
    case = copy.deepcopy(case)
    expected = case["expect"]
    if "error" in expected:
        case["expect"] = {"result": {"spoiled": 1}, "oci": {"spoiled": 1}, "lenient": {}}
    elif "oci" in expected:
        expected["oci"]["spoiled"] = 1
    else:
        expected["result"] = {key: f"not {value}" for key, value in expected["result"].items()}
    return case


@pytest.mark.parametrize("operation", cases.OPERATIONS)
def test_a_wrong_expectation_fails(operation: str) -> None:
    """The runner compares every expectation."""
    for case in CASES.values():
        if case["op"] == operation and case["name"] not in cases.REFUSED:
            with pytest.raises((cases.DifferenceError, AttributeError, KeyError, TypeError)):
                cases.run(spoiled(case))


def test_a_folder_of_cases_can_be_run(tmp_path: Path) -> None:
    """`make conformance CASES=DIR` prints the failing names, then the counts, and exits with 1."""
    good = next(iter(CASES.values()))
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "spoiled.json").write_text(json.dumps(spoiled(good)))
    ran = subprocess.run(
        [sys.executable, cases.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = ran.stdout.splitlines()
    assert ran.returncode == 1
    assert len(lines) == 2
    assert lines[0].startswith("spoiled: ")
    assert lines[1] == "1 passed, 1 failed"
