# SPDX-License-Identifier: Apache-2.0
"""What tests of one hostile case share: its mount namespace, a program in ldconfig's place.

The programs of this directory print one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOSTILE = Path(__file__).parent


def play(program: str, *words: object, tracer: Sequence[str] = ()) -> dict[str, Any]:
    """Run *program* of this directory in a mount namespace of its own; return what it printed.

    *tracer* is a command in front of it.
    """
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", *tracer, sys.executable,
         str(HOSTILE / program), *map(str, words)],
        capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def build_pretender(directory: Path) -> str:
    """Build a program in *directory* that says what it may do in ldconfig's place; return it."""
    program = directory / "ldconfig"
    command = ["gcc", "-static", "-O1", "-o", program, HOSTILE / "pretends.c"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return str(program)
