# SPDX-License-Identifier: Apache-2.0
"""EXEC-04: every program that runs while a container is created is one of the host's own.

Each mode on real runc, under strace, with an image that has a program for every name.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from scenarios.machine import SCENARIOS, TREE, run_on_host

pytestmark = [pytest.mark.system("runc", "strace"), pytest.mark.catalogue("EXEC-04")]
MODES = ("cdi", "jit-cdi", "legacy", "host ldconfig")
LAUNCHER = TREE / "build" / "launcher"
PYTHONS = ("/usr/bin/python3", sys.executable)
SIMULATED = str(TREE / "build" / "simhost" / "fakeproc")
# What runs from memory, or from the file that it already is.
NAMELESS = {"runc", "ldconfig"}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return what every mode came to, on one simulated host."""
    return run_on_host(SCENARIOS / "programs.py")


def strangers(case: dict[str, Any]) -> list[str]:
    """Return the programs that neither we nor the low-level runtime have to run."""
    # Its hook brings the driver's /proc, in place of the kernel's module.
    simulated = {path for _, path, _ in case["programs"] if path.startswith(SIMULATED)}
    known = {os.path.realpath(path) for path in (LAUNCHER, *PYTHONS, "/usr/sbin/runc")}
    return [
        name
        for name, path, own in case["programs"]
        if not (path in known | simulated or (path == "" and Path(own).name in NAMELESS))
    ]


def can_be_changed(path: str) -> bool:
    """Return whether others than root can write the file *path*, or one of its directories."""
    places = [Path(path), *Path(path).parents]
    found = [place.stat() for place in places]
    return any(
        status.st_uid != 0 or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX)
        for status in found
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_programs_are_the_host_s(results: dict[str, Any], mode: str) -> None:
    """Launcher, interpreters, low-level runtime; a sealed ldconfig where the operator wants it."""
    case = results[mode]
    assert case["status"] == 0, case["output"]
    assert not case["marked"]
    assert strangers(case) == []
    names = {name for name, _, _ in case["programs"] if name}
    assert all(name.startswith("/") for name in names)
    assert not any(path.startswith(case["root"]) for _, path, _ in case["programs"])
    changeable = {path for _, path, _ in case["programs"] if path and can_be_changed(path)}
    assert changeable == set()
    ran = {Path(own).name for _, path, own in case["programs"] if path == ""}
    assert ("ldconfig" in ran) is (mode == "host ldconfig")
    # The trace has them all: the shim, the hook, and who starts it.
    called = {Path(own).name for _, _, own in case["programs"]}
    hook = "gpu-container-runtime-hook" if mode == "legacy" else "gpu-cdi-hook"
    assert {"gpu-container-runtime", hook, "runc"} <= called


def test_control_a_weak_hook_runs_what_the_image_has(results: dict[str, Any]) -> None:
    """`#!/usr/bin/env python3` finds the image's, by its PATH."""
    case = results["control"]
    assert case["marked"]
    assert "bin/python3" in strangers(case)
    assert any(path.startswith(case["root"]) for _, path, _ in case["programs"])
