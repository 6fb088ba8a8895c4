# SPDX-License-Identifier: Apache-2.0
"""Run a program on a simulated host, and see that the machine is afterwards as before."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from containers.machine import differences, of_machine

TREE = Path(__file__).parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
SCENARIOS = TREE / "tests" / "scenarios"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SCENARIOS)}


@functools.cache
def variants_by_attack() -> dict[str, list[str]]:
    """Return attack → the variants in which hostile.py plays it."""
    script = """
import hostile, json
names = [prepare.__name__ for prepare, _ in hostile.ATTACKS]
print(json.dumps({name: hostile.variants(name) for name in names}))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    variants: dict[str, list[str]] = json.loads(done.stdout)
    return variants


def attack_names(prefix: str = "") -> list[str]:
    """Return the names of the attacks that begin with *prefix*."""
    return [name for name in variants_by_attack() if name.startswith(prefix)]


def run_on_host(program: Path, *words: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run *program* with the arguments *words* on a simulated host with *options*.

    Return what it prints.
    """
    before = of_machine()
    inside = [sys.executable, str(program), *words]
    done = subprocess.run(
        [sys.executable, str(SIMHOST), "run", *options, "--", *inside],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert differences(before, of_machine) == []
    results: dict[str, Any] = json.loads(done.stdout)
    return results
