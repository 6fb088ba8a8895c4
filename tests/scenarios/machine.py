# SPDX-License-Identifier: Apache-2.0
"""What a container test could leave on the machine, and how to run a scenario on a GPU host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

TREE = Path(__file__).parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
SCENARIO = TREE / "tests" / "scenarios" / "scenario.py"
SETTLE_S = 10.0
# Simulated hosts of other runs come and go; tests/system/test_simhost.py sees that ours do.
FOREIGN_GROUP = re.compile(r"/simhost-\d+(/|$)")


def snapshot() -> dict[str, frozenset[str]]:
    """Return nodes, mounts, cgroups, runtime state and the loader cache's identity."""
    nodes = set()
    for directory, children, names in os.walk("/dev"):
        if directory == "/dev":
            children[:] = [name for name in children if name not in {"pts", "shm", "mqueue"}]
        nodes |= {f"{directory}/{name}" for name in names}
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    groups = (directory for directory, _, _ in os.walk("/sys/fs/cgroup"))
    cache = Path("/etc/ld.so.cache").stat()
    return {
        "/dev": frozenset(nodes),
        "mounts": frozenset(line.split(maxsplit=2)[2] for line in mounts),
        "cgroups": frozenset(d for d in groups if not FOREIGN_GROUP.search(d)),
        "/run": frozenset(os.listdir("/run")),
        "/etc": frozenset(os.listdir("/etc")),
        "/etc/ld.so.cache": frozenset({f"{cache.st_ino} {cache.st_mtime_ns}"}),
    }


def differences(before: dict[str, frozenset[str]]) -> list[str]:
    """Return what differs from *before*, after some time for what ends by itself."""
    end = time.monotonic() + SETTLE_S
    while True:
        after = snapshot()
        found = [f"{what}: {item}" for what in before for item in after[what] ^ before[what]]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)


def run_scenario(
    *arguments: str, simhost: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run scenario.py with *arguments* on a fresh simulated host."""
    command = [sys.executable, str(SIMHOST), "run", *simhost, "--"]
    command += [sys.executable, str(SCENARIO), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=150, stdin=subprocess.DEVNULL
    )
