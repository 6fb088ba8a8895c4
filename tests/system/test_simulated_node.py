# SPDX-License-Identifier: Apache-2.0
"""The simulated GPU host as a node: MIG layouts, links and NUMA nodes, and changes at run time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
CHANGE = TREE / "tests" / "simhost" / "change.py"
# Runs on the host. Prints what a watcher reports while the host changes.
OBSERVE = """
import asyncio, json, subprocess, sys
from gpunode.model import DriverState
from gpunode.watch.supervision import Settings
from gpunode.watch.watcher import Watcher

def change(*arguments):
    subprocess.run([sys.executable, sys.argv[1], *arguments], check=True)

def described(model):
    return {
        "gpus": [
            [gpu.numa_node, [[m.attributes.profile, m.attributes.start] for m in gpu.mig_devices]]
            for gpu in model.gpus
        ],
        "links": sorted([int(link.topology), link.nvlinks] for link in model.links.values()),
        "problems": model.problems,
        "left out": len(model.left_out),
    }

async def main():
    events, states, models = [], [], []

    async def until(condition):
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.02)

    async with Watcher(settings=Settings(poll_s=0.1, restart_s=0.1)) as watcher:
        async def collect():
            async for update in watcher.updates():
                events.extend([event.kind.value, event.xid] for event in update.events)
                if not states or states[-1] != update.status.state.value:
                    states.append(update.status.state.value)
                models.append(update.model)
        task = asyncio.create_task(collect())
        is_in = lambda state: lambda: watcher.current.status.state is state
        await until(is_in(DriverState.READY))
        model = described(watcher.current.model)
        change("say", "at 0 xid 0 79")
        await until(lambda: events)
        change("unload")
        await until(is_in(DriverState.ABSENT))
        change("load")
        await until(is_in(DriverState.READY))
        change("unload")
        await until(is_in(DriverState.ABSENT))
        change("load", "570.86.15")
        await until(is_in(DriverState.MISMATCHED))
    await task
    print(json.dumps({"model": model, "events": events, "states": states}))

asyncio.run(main())
"""


def run(*options: str, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run *command* on a host with *options*."""
    return subprocess.run(
        [sys.executable, SIMHOST, "run", "--gpus", "2", *options, "--", *command],
        cwd=TREE,
        env={**os.environ, "PYTHONPATH": str(TREE)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.system
@pytest.mark.slow
def test_a_watcher_sees_the_host_that_was_asked_for_and_its_changes() -> None:
    """MIG devices where the driver would place them; loaded again, it is another driver."""
    done = run(
        *("--mig", "1:3g.40gb,1g.10gb+me,2g.20gb", "--numa", "0:3", "--numa", "1:-1"),
        *("--nvml", "nvlink 0 1 4", "--nvml", "nvlink 1 0 4", "--nvml", "topology 0 1 20"),
        command=(sys.executable, "-c", OBSERVE, str(CHANGE)),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == {
        "gpus": [[3, []], [None, [["3g.40gb", 4], ["1g.10gb+me", 2], ["2g.20gb", 0]]]],
        "links": [[40, 4], [40, 4]],
        "problems": [],
        "left out": 0,
    }
    assert report["events"] == [["xid", 79], ["driver-changed", 0]]
    assert report["states"][-5:] == ["ready", "absent", "ready", "absent", "mismatched"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--mig", "0:3g.40gb,3g.40gb,1g.10gb", "no room for 3g.40gb, 3g.40gb, 1g.10gb"),
        ("--mig", "0:4g.40gb,4g.40gb", "no room"),
        ("--mig", "0:9g.90gb", 'no MIG profile "9g.90gb"'),
        ("--mig", "0:8", "0 to 7"),
        ("--numa", "0:x", "--numa is not GPU:NODE"),
    ],
)
def test_a_host_that_cannot_be_is_refused(option: str, value: str, message: str) -> None:
    """By name, before anything is made."""
    done = run(option, value, command=("true",))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
