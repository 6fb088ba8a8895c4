# SPDX-License-Identifier: Apache-2.0
"""What a process may do, and whether the user nobody can run the programs under test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def can_nobody_run() -> bool:
    """Return whether the user nobody can run the program under test."""
    nobody = ("runuser", "-u", "nobody", "--")
    words = [*nobody, sys.executable, "-c", "import gpunode"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def status_of(pid: int) -> dict[str, str]:
    """Return the lines of /proc/PID/status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
