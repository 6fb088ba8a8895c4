# SPDX-License-Identifier: Apache-2.0
"""Measure scrapes of `gpu-node exporter` on a node with 8 GPUs of 7 MIG devices, and 56 pods.

Prints the processor time of a scrape, and by how much the process grows in 10,000 of them.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from node import full_node

SCRAPES, WARM_UP = 10_000, 200
# The most that the project allows itself.
LIMITS = {"CPU of a scrape, ms": 30.0, "growth, MiB": 1.0}


def resident_mib() -> float:
    """Return the resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def measure(proc: Path) -> dict[str, float]:
    """Return the figures by the names of LIMITS."""
    service = full_node.exporter(proc)
    number = 0

    def polls(count: int) -> float:
        nonlocal number
        spent = 0.0
        for _ in range(count):
            number += 1
            full_node.observe(service, number)
            begin = time.process_time()
            service.scrape()
            spent += time.process_time() - begin
        return spent

    polls(WARM_UP)
    before = resident_mib()
    spent = polls(SCRAPES)
    figures = (spent / SCRAPES * 1000, resident_mib() - before)
    return dict(zip(LIMITS, figures, strict=True))


def main() -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory))
    print(f"exporter, 8 GPUs with 7 MIG devices each, 56 pods, {SCRAPES} scrapes")
    for name, limit in LIMITS.items():
        print(f"{name:20}{figures[name]:>12.2f}{limit:>12.2f}")


if __name__ == "__main__":
    main()
