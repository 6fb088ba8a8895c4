# SPDX-License-Identifier: Apache-2.0
"""Containers from create to delete, and the cost of each operation. For the simulated host.

Each container has its own overlay and config.json. A small C program spawns every command.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import image
import namespace
from bench.cases import OPERATIONS, OURS, RUNC, Case
from drivers import run

TESTS = Path(__file__).resolve().parents[1]
WORK = Path("/run/gpuruntime-bench")
# The cache directory between creates; the benchmark makes no assumption about its files.
KEPT = Path("/run/gpuruntime")
PREFIX = Path("/srv/gpuruntime")
PROGRAM = PREFIX / "bin" / "gpu-container-runtime"
HOOK = "gpu-cdi-hook"
NAME = "bench"
DEADLINE_S = 20.0
SETTLED_S = 0.05
MNT_DETACH = 2


class Sample(NamedTuple):
    """Wall clock and CPU time of one command, and its peak memory."""

    wall_ms: float
    cpu_ms: float
    peak_kib: int


class BenchError(Exception):
    """A measured command failed."""


@dataclass(frozen=True)
class Spawner:
    """Runs commands by launch.c. Standard output and error go to a file below *work*."""

    launch: Path
    work: Path

    @property
    def report(self) -> Path:
        """Return the path of the report that launch.c writes."""
        return self.work / "report"

    @property
    def output(self) -> Path:
        """Return the path of the output of the commands."""
        return self.work / "output"

    def time(self, command: Sequence[object], environment: dict[str, str] | None = None) -> Sample:
        """Run *command* and return its cost; raise BenchError if it fails."""
        words = [str(self.launch), str(self.report), *map(str, command)]
        self.report.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        actions: Sequence[tuple[Any, ...]] = (
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(self.output), flags, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        )
        child = os.posix_spawn(words[0], words, environment or os.environ, file_actions=actions)
        os.waitpid(child, 0)
        samples = self.reported()
        if not samples:
            raise BenchError(f"{' '.join(words)}: {self.output.read_text()[-2000:]}")
        return samples[0]

    def reported(self) -> list[Sample]:
        """Return the samples of the report; raise BenchError if a command failed."""
        samples = []
        for line in self.report.read_text().splitlines() if self.report.exists() else ():
            wall, cpu, peak, status = map(int, line.split())
            if status != 0:
                raise BenchError(f"status {status}: {self.output.read_text()[-2000:]}")
            samples.append(Sample(wall / 1e6, cpu / 1e3, peak))
        return samples


class Place:
    """The userland, the config.json documents and the runtimes of one host."""

    def __init__(self, launch: Path) -> None:
        self.userland = image.make_root(WORK / "userland")
        self.runc = shutil.which("runc")
        self.spawner = Spawner(launch, WORK)
        self.documents: dict[Case, str] = {}
        run("runc", "spec", "--bundle", WORK)
        self.base = json.loads((WORK / "config.json").read_text())
        run(sys.executable, TESTS / "simhost" / "simhost.py", "fakeproc", WORK)
        self.hooks = json.loads((WORK / "config.json").read_text())["hooks"]

    @property
    def bundle(self) -> Path:
        """Return the bundle of the containers: the same for all, so that edits fit."""
        return WORK / "life" / "bundle"

    def program(self, case: Case) -> str:
        """Return the path of the runtime of *case*."""
        return {RUNC: str(self.runc), OURS: str(PROGRAM)}.get(case.program, case.program)

    def document(self, case: Case) -> str:
        """Return the config.json of *case*, as an engine would write it."""
        if case.edits is not None:
            return self._edited(case)
        config = json.loads(json.dumps(self.base))
        config["process"]["terminal"] = False
        config["process"]["args"] = ["/bin/busybox", "sleep", "100000"]
        config["process"]["env"] = [image.PATH, *case.environment]
        config["root"]["readonly"] = False
        if case.has_stand_in:
            config["hooks"] = self.hooks
        return json.dumps(config)

    def _edited(self, case: Case) -> str:
        """Return the config.json of *case* with the edits of our runtime."""
        if case not in self.documents:
            asking = Case(case.host, case.name, OURS, case.gpus, case.capabilities)
            self.create(asking)
            config = json.loads(self.create(asking))
            if case.edits == "no hook":
                for stage, hooks in config["hooks"].items():
                    config["hooks"][stage] = [h for h in hooks if not h["path"].endswith(HOOK)]
            self.documents[case] = json.dumps(config)
        return self.documents[case]

    def create(self, case: Case, document: str | None = None) -> str:
        """Create and delete a container, untimed; return the resulting config.json."""
        self._prepare(document or self.document(case))
        try:
            self.spawner.time([self.program(case), *self.words("create")])
            return (self.bundle / "config.json").read_text()
        finally:
            self._end()

    def hook(self, case: Case) -> Sample:
        """Return the cost of our hook in a create by runc with the edits of *case*."""
        config = json.loads(self.document(case))
        report = WORK / "hook"
        report.unlink(missing_ok=True)
        for hook in (h for hooks in config["hooks"].values() for h in hooks):
            if hook["path"].endswith(HOOK):
                words = [hook["path"], *hook["args"][1:]]
                hook["path"] = str(self.spawner.launch)
                hook["args"] = ["launch", str(report), *words]
        self.create(Case("", "", RUNC), json.dumps(config))
        samples = Spawner(self.spawner.launch, WORK)
        report.rename(samples.report)
        (sample,) = samples.reported()
        return sample

    def live(self, case: Case, document: str | None = None) -> dict[str, Sample]:
        """Run a container of *case*; return the cost of each of OPERATIONS.

        *document* is its config.json; None: that of the case.
        """
        document = document or self.document(case)
        self.create(case, document)
        # The kernel still cleans up the deleted container: a new one would wait for that.
        time.sleep(SETTLED_S)
        if case.is_cold:
            forget()
        self._prepare(document)
        samples = {}
        try:
            for operation in OPERATIONS:
                command = [self.program(case), *self.words(operation)]
                samples[operation] = self.spawner.time(command)
                if operation == "kill":
                    self._wait()
        except BenchError as error:
            raise BenchError(f"{case.full_name}, {operation}: {error}") from None
        finally:
            self._end()
        return samples

    def words(self, operation: str) -> list[str]:
        """Return the arguments of the runtime for *operation*."""
        pid_file = str(WORK / "life" / "pid")
        more = {
            "create": ["--bundle", str(self.bundle), "--pid-file", pid_file, NAME],
            "exec": [NAME, "/bin/busybox", "true"],
            "kill": [NAME, "KILL"],
        }
        return ["--root", str(WORK / "state"), operation, *more.get(operation, [NAME])]

    def _prepare(self, document: str) -> None:
        """Make a new bundle with *document*, and an overlay on the userland."""
        life = WORK / "life"
        for name in ("upper", "work", "bundle/rootfs"):
            (life / name).mkdir(parents=True)
        (self.bundle / "config.json").write_text(document)
        options = f"lowerdir={self.userland},upperdir={life}/upper,workdir={life}/work"
        namespace.mount("overlay", self.bundle / "rootfs", "overlay", 0, options)

    def _wait(self) -> None:
        """Wait until the container's process, which is ours to reap, has ended."""
        os.waitpid(int((WORK / "life" / "pid").read_text()), 0)

    def _end(self) -> None:
        """Delete the container, if it exists, and its bundle."""
        state = WORK / "state" / NAME
        if state.exists():
            # runc and crun write different state files.
            program = "runc" if (state / "state.json").exists() else "crun"
            run(program, "--root", WORK / "state", "delete", "--force", NAME)
            reap()
        namespace.unmount(self.bundle / "rootfs", MNT_DETACH)
        shutil.rmtree(WORK / "life")


def forget() -> None:
    """Remove the cache between creates."""
    for path in KEPT.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def reap() -> None:
    """Wait for the child processes of deleted containers; raise BenchError after DEADLINE_S."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            return
    raise BenchError("a container's process does not end")
