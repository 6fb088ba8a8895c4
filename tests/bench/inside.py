# SPDX-License-Identifier: Apache-2.0
"""Measure on the simulated host that this runs on: a line of JSON asks, a line answers.

`inside.py LAUNCH HELLO CONFIG FLAGS`: two programs, lines of config.toml, and further options of
the compiler for the launcher. The first line that is
written says that our runtime is installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import namespace
from artefacts import SimhostError
from bench import bare, counts, engines, views
from bench.cases import CDI, Case
from bench.lives import PREFIX, TESTS, WORK, BenchError, Place
from drivers import FailedError, run
from scenario import CONFIG

PR_SET_CHILD_SUBREAPER = 36
PRIORITY = 10
# Of a spec that is younger nothing is kept.
SETTLED_S = 1.2


def install(config: str, flags: str) -> None:
    """Install into a file system of its own; have *config* in the config file, and its spec.

    The launcher is compiled with *flags* as well.
    """
    namespace.mount("tmpfs", PREFIX.parent, "tmpfs")
    options = (f"PREFIX={PREFIX}", f"PYTHON={sys.executable}", f"LAUNCHER_MORE={flags}")
    # What an outer make tells its children is not for this one.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }
    run("make", "--no-print-directory", "-C", TESTS.parent, "install", *options, env=environment)
    os.environ["PATH"] = f"{PREFIX}/bin:{os.environ['PATH']}"
    if config:
        CONFIG.parent.mkdir(exist_ok=True)
        CONFIG.write_text(f"[nvidia-container-runtime]\n{config}\n")
    if config == CDI:
        run(PREFIX / "bin" / "gpuruntime", "cdi", "generate", "--output", "/etc/cdi/nvidia.json")
        time.sleep(SETTLED_S)


class Answers:
    """What can be asked for, by name."""

    def __init__(self, place: Place, hello: Path) -> None:
        self.place = place
        self.bare = bare.Programs(place, hello)

    def life(self, **case: Any) -> Any:
        """Return what each operation of a container cost."""
        return self.place.live(Case(**case))

    def programs(self) -> Any:
        """Return what programs cost that do nothing, and our runtime in front of one."""
        return self.bare.time()

    def hook(self, **case: Any) -> Any:
        """Return what our hook cost in a create with the edits of a case."""
        return self.place.hook(Case(**case))

    def first(self) -> Any:
        """Run ahead of everything that is not: for a machine that others use too.

        Not with the daemons of engines, whose threads would be, too, and wait in loops.
        """
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))

    def counts(self) -> Any:
        """Return the instructions of our runtime."""
        return self.bare.count()

    def count_hook(self, **case: Any) -> Any:
        """Return the instructions of our hook in a create with the edits of a case."""
        return counts.hook(self.place, Case(**case))

    def questions(self, **case: Any) -> Any:
        """Return how often a cold create loads NVML."""
        return counts.questions(self.place, Case(**case))

    def engines(self, repetitions: int, runtimes: dict[str, str]) -> Any:
        """Return what containers of docker and containerd cost."""
        return engines.take(self.place.spawner, repetitions, runtimes)

    def view(self, **row: Any) -> Any:
        """Return what a life with another way to bring the driver's files costs."""
        return views.live(self.place, **row)

    def files(self, capabilities: str | None) -> Any:
        """Return what a container of 8 GPUs is given, by number."""
        return views.count(self.place, capabilities)


def main() -> None:
    """Prepare, and answer until the input ends."""
    launch, hello, config, flags = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    WORK.mkdir()
    namespace.mount("tmpfs", WORK, "tmpfs")
    install(config, flags)
    answers = Answers(Place(Path(launch)), Path(hello))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(answers, name)(**arguments)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (BenchError, FailedError, SimhostError, OSError) as error:
        sys.exit(f"bench: {error}")
