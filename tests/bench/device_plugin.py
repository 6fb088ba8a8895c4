# SPDX-License-Identifier: Apache-2.0
"""Measure `gpu-node device-plugin` on a simulated host with 8 GPUs of 7 MIG devices.

Prints the memory of its processes while a fake kubelet has its stream open, their wake-ups a
second while nothing happens, and how long Allocate takes with 448 units. PEER in the environment
is another program with the same flags, measured beside it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench import simulated
from node.fake_kubelet import FakeKubelet, until

REPLICAS = 8
UNITS = 8 * 7 * REPLICAS
CALLS = 2000
SETTLE_S, IDLE_S = 3.0, 20.0
START_S = 60.0
SHARED = f"""\
version: v1
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: false
    resources:
    - name: nvidia.com/gpu
      replicas: {REPLICAS}
"""
# The most that the project allows itself.
LIMITS = {"memory, MiB": 60.0, "wake-ups a second": 2.0, "Allocate, ms": 5.0}


@dataclass(frozen=True)
class Figures:
    """What one program costs."""

    memory_mib: float
    wake_ups: float
    allocate_ms: float

    def row(self) -> dict[str, float]:
        """Return the figures by the names of LIMITS."""
        return dict(zip(LIMITS, (self.memory_mib, self.wake_ups, self.allocate_ms), strict=True))


def family(pid: int) -> list[int]:
    """Return *pid* and its descendants."""
    pids = [pid]
    for each in pids:
        for thread in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, thread.read_text().split())
    return pids


def memory(pids: list[int]) -> float:
    """Return the proportional set size of the processes *pids* in MiB."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def switches(pids: list[int]) -> int:
    """Return how often the threads of *pids* have waited, and so were woken."""
    total = 0
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with suppress(OSError):
                for line in status.read_text().splitlines():
                    if line.startswith("voluntary_ctxt_switches"):
                        total += int(line.split()[1])
    return total


async def measure(program: list[str]) -> Figures:
    """Return the figures of *program*, started with the flags of a device plugin."""
    directory = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
    config = directory / "shared.yaml"
    config.write_text(SHARED)
    sockets = directory / "s"
    sockets.mkdir()
    kubelet = FakeKubelet(sockets)
    await kubelet.start()
    nothing = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *program,
        *("--mig-strategy=single", "--device-list-strategy=envvar"),
        *(f"--config-file={config}", f"--kubelet-socket={kubelet.socket}"),
        stdout=nothing,
        stderr=nothing,
    )
    try:
        await until(lambda: bool(kubelet.live()), START_S)
        (connection,) = kubelet.connections
        ids = [item.ID for item in connection.devices]
        if len(ids) != UNITS:
            sys.exit(f"bench: {len(ids)} units are offered, not {UNITS}")
        await asyncio.sleep(SETTLE_S)
        times = []
        for number in range(CALLS):
            begin = time.perf_counter()
            await connection.allocate([ids[number % UNITS]])
            times.append(time.perf_counter() - begin)
        await asyncio.sleep(SETTLE_S)
        pids = family(process.pid)
        before = switches(pids)
        await asyncio.sleep(IDLE_S)
        wake_ups = (switches(pids) - before) / IDLE_S
        return Figures(memory(pids), wake_ups, sorted(times)[CALLS * 99 // 100] * 1000)
    finally:
        process.terminate()
        await process.wait()
        await kubelet.stop()


def inside() -> None:
    """Measure on this simulated host, and print a table."""
    programs = {"gpu-node": [str(Path(sys.prefix, "bin", "gpu-node")), "device-plugin"]}
    if os.environ.get("PEER"):
        programs["peer"] = [os.environ["PEER"]]
    rows = {name: asyncio.run(measure(program)).row() for name, program in programs.items()}
    print(f"device plugin, 8 GPUs with 7 MIG devices each, {UNITS} units")
    print(f"{'':20}" + "".join(f"{name:>12}" for name in rows) + f"{'limit':>12}")
    for name, limit in LIMITS.items():
        values = "".join(f"{row[name]:>12.2f}" for row in rows.values())
        print(f"{name:20}{values}{limit:>12.2f}")


if __name__ == "__main__":
    simulated.run(inside, __file__)
