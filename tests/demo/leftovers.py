# SPDX-License-Identifier: Apache-2.0
"""What a run of the demo could leave on the machine, by the names that the demo itself chose.

Other programs make and remove mounts, cgroups and processes at the same time: theirs do not count.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

SETTLE_S = 10.0
CGROUPS = "/sys/fs/cgroup"


@dataclass(frozen=True)
class Traces:
    """Names of one run: its work directory, its mount point, its cgroups, earlier driver nodes."""

    directories: tuple[str, ...]
    cgroups: tuple[str, ...]
    nodes: frozenset[str]

    def remaining(self) -> list[str]:
        """Return what is still there, after some time for what ends by itself."""
        end = time.monotonic() + SETTLE_S
        while True:
            items = [*self._mounts(), *self._cgroups(), *child_processes()]
            if not items or time.monotonic() > end:
                return items
            time.sleep(0.1)

    def new_nodes(self) -> list[str]:
        """Return the driver's nodes that were not there before: its own tool makes them."""
        return sorted(driver_nodes() - self.nodes)

    def _mounts(self) -> list[str]:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            points = [line.split()[4] for line in lines]
        return [f"mount: {point}" for point in points if self._is_below(point)]

    def _is_below(self, path: str) -> bool:
        return any(f"{path}/".startswith(f"{directory}/") for directory in self.directories)

    def _cgroups(self) -> list[str]:
        return [
            f"cgroup: {directory}/{name}"
            for directory, names, _ in os.walk(CGROUPS)
            for name in names
            if name in self.cgroups
        ]


def driver_nodes() -> frozenset[str]:
    """Return the paths of the device nodes of NVIDIA's driver."""
    return frozenset(
        os.path.join(directory, name)
        for directory, _, names in os.walk("/dev")
        for name in names
        if os.path.join(directory, name).startswith("/dev/nvidia")
    )


def child_processes() -> list[str]:
    """Reap the children of this process that have ended, and return those that still run."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if pid == 0:
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as stream:
                return [f"process: {word}" for word in stream.read().split()]
