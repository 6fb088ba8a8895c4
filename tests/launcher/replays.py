# SPDX-License-Identifier: Apache-2.0
"""A machine on which containers get what a CDI spec has: from Python, then from the launcher."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.bundles import write_companion

from gpuruntime.config import Config
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.launcher import companion, replay
from gpuruntime.log import Log
from gpuruntime.oci import argv
from gpuruntime.shim import main
from gpuruntime.shim.host import ShimHost
from gpuruntime.snapshots.grants import SavedGrants

if TYPE_CHECKING:
    from launcher.conftest import Bench, Outcome

RECORDED = Path(__file__).parents[1] / "data" / "configs"
# A younger spec is not taken for settled.
SETTLED_S = 1.1
PLACES = ("/usr/lib/x/libcuda.so.1", "/usr/bin/nvidia-smi", "/etc/nv", "/top")
RUNTIME = "nvidia-container-runtime"


def spec(node: Path, files: Path) -> dict[str, Any]:
    """Return a spec with something of each kind; *node* and *files* are the host's."""
    return {
        "cdiVersion": "0.7.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {
                "name": name,
                "containerEdits": {
                    "deviceNodes": [
                        {"path": f"/dev/nvidia{i}", "type": "c", "major": 195, "minor": i}
                        for i in minors
                    ],
                    "env": [f"GPU_{name}=<&>"],
                },
            }
            for name, minors in (("0", (0,)), ("1", (1,)), ("2", (2,)), ("all", (0, 1, 2)))
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void", "É=é"],
            "deviceNodes": [{"path": "/dev/nvidiactl", "hostPath": str(node)}],
            "mounts": [
                {"hostPath": f"{files}{path}", "containerPath": path, "options": ["ro", "rbind"]}
                for path in PLACES
            ],
            "hooks": [
                {
                    "hookName": "createContainer",
                    "path": "/usr/bin/gpu-cdi-hook",
                    "args": ["gpu-cdi-hook", "update"],
                }
            ],
            "additionalGids": [44],
        },
    }


@dataclass
class Scene:
    """Where creates are given something, first by Python and then by the launcher of *build*.

    *itself* is what the launcher has for its own file, None for that.
    """

    bench: Bench
    build: str
    config: Config
    itself: str | None = None

    @classmethod
    def make(cls, bench: Bench, build: str) -> Scene:
        """Return a scene with a spec, once it is old enough."""
        specs, node, files = (bench.path(f"specs{end}") for end in ("", "-node", "-files"))
        if not specs.exists():
            specs.mkdir(mode=0o755)
            # A pipe: it needs no privilege, and no node of this machine.
            os.mkfifo(node, 0o666)
            for place in PLACES:
                file = Path(f"{files}{place}")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            (specs / "nvidia.json").write_text(json.dumps(spec(node, files)))
            time.sleep(SETTLED_S)
        values = {f"{RUNTIME}.mode": "cdi", f"{RUNTIME}.modes.cdi.spec-dirs": [str(specs)]}
        made = cls(bench, build, Config(values, None))
        found = companion.content(made.config, None)
        assert found is not None
        write_companion(bench, found.decode())
        return made

    @property
    def program(self) -> str:
        """The launcher as it is called."""
        return str(self.bench.workshop.build(self.build) / "gpu-container-runtime")

    @property
    def file(self) -> Path:
        """The file of answers."""
        return self.bench.path("run/replay")

    @property
    def bundle(self) -> Path:
        """The bundle of the launcher."""
        return self.bench.path("other/bundle")

    def caller(self, **changed: str) -> replay.Caller:
        """Return how the launcher is called."""
        status = Path(self.itself or self.program).stat()
        how = {
            "program": self.program,
            "identity": f"{status.st_dev}:{status.st_ino}",
            "path": self.bench.environment()["PATH"],
        }
        return replay.Caller(**{**how, **changed})

    def by_python(self, data: bytes) -> bytes | None:
        """Return what the shim makes of *data*, None if it refuses."""
        bundle = self.bench.path("other/by-python")
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir(parents=True)
        (bundle / "config.json").write_bytes(data)
        command = argv.parse(["create", "--bundle", str(bundle), "c1"])
        log = Log(None, json_format=False)
        saved = SavedGrants(str(self.bench.path("run")))
        saved.use(None, {})
        host = ShimHost(self.config, sys.executable, self.program, log, saved)
        try:
            main.inject(command, self.config, host, log, "/usr/bin/runc")
        except GpuRuntimeError:
            return None
        return (bundle / "config.json").read_bytes()

    def remember(self, data: bytes, caller: replay.Caller | None = None) -> bytes | None:
        """Give *data* by Python, and have it kept for the launcher; return what it became."""
        given = self.by_python(data)
        if given is None:
            return None
        run = str(self.bench.path("run"))
        saved = SavedGrants(run)
        saved.use(None, {})
        replay.keep(data, self.config, saved, caller or self.caller(), run)
        return given

    def create(self, data: bytes, *options: str, **variables: str) -> Outcome:
        """Have the launcher create a container of *data*."""
        shutil.rmtree(self.bundle, ignore_errors=True)
        self.bundle.mkdir(parents=True)
        (self.bundle / "config.json").write_bytes(data)
        return self.start(*options, **variables)

    def start(self, *options: str, **variables: str) -> Outcome:
        """Have the launcher create the container of the bundle as it is."""
        return self.bench.runtime(
            *options,
            *("create", "--bundle", str(self.bundle), "c1"),
            build=self.build,
            env=self.bench.environment(**variables),
        )

    @property
    def written(self) -> bytes:
        """The config.json that is there by now; asserts that nothing else is."""
        assert [path.name for path in self.bundle.iterdir()] == ["config.json"]
        return (self.bundle / "config.json").read_bytes()

    def replays(self, data: bytes, *options: str, **variables: str) -> bool:
        """Return whether the launcher answers *data*; asserts that it does as Python does."""
        who = self.create(data, *options, **variables).who
        if who == "lowlevel/runc":
            assert self.written == self.by_python(data)
            return True
        assert who == "python"
        assert self.written == data
        return False


def recorded(engine: str) -> bytes:
    """Return what *engine* has written for a container with GPUs."""
    return (RECORDED / f"{engine}-gpu.json").read_bytes()


def mode_of(path: Path) -> tuple[int, int, int]:
    """Return mode, owner and group of a file."""
    status = path.stat()
    return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
