# SPDX-License-Identifier: Apache-2.0
"""Run a program of attacks on a simulated host, and what a test may ask about it before that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scenarios.machine import SIMHOST, TREE, differences, snapshot

SCENARIOS = TREE / "tests" / "scenarios"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SCENARIOS)}


def attack_names(prefix: str) -> list[str]:
    """Return the names of the attacks that begin with *prefix*."""
    script = "import hostile; print(*(prepare.__name__ for prepare, _ in hostile.ATTACKS))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split() if name.startswith(prefix)]


def run_on_host(program: str) -> dict[str, Any]:
    """Run *program*, beside this file, on a simulated host; return its JSON."""
    before = snapshot()
    path = Path(__file__).parent / program
    done = subprocess.run(
        [sys.executable, str(SIMHOST), "run", "--", sys.executable, str(path)],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    left = differences(before)
    assert left == [], left
    found: dict[str, Any] = json.loads(done.stdout)
    return found
