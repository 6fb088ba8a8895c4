# SPDX-License-Identifier: Apache-2.0
"""A machine on which containers get CDI edits, from Python and then from the launcher."""

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
# A spec that is younger is not cached.
SETTLED_S = 1.1
PLACES = ("/usr/lib/x/libcuda.so.1", "/usr/bin/nvidia-smi", "/etc/nv", "/top")
RUNTIME = "nvidia-container-runtime"


def spec(node: Path, files: Path) -> dict[str, Any]:
    """Return a spec with edits of each kind; *node* and *files* are paths of the host."""
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
    """The files of creates that Python and then the launcher of *build* edit.

    *itself* is the file that the launcher identifies as its own; None: its real file.
    """

    bench: Bench
    build: str
    config: Config
    itself: str | None = None

    @classmethod
    def make(cls, bench: Bench, build: str) -> Scene:
        """Return a scene with a spec that is old enough for a replay."""
        specs, node, files = (bench.path(f"specs{end}") for end in ("", "-node", "-files"))
        if not specs.exists():
            specs.mkdir(mode=0o755)
            # A FIFO: it needs neither privileges nor a node of this machine.
            os.mkfifo(node, 0o666)
            for place in PLACES:
                file = Path(f"{files}{place}")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            (specs / "nvidia.json").write_text(json.dumps(spec(node, files)))
            time.sleep(SETTLED_S)
        values = {f"{RUNTIME}.mode": "cdi", f"{RUNTIME}.modes.cdi.spec-dirs": [str(specs)]}
        scene = cls(bench, build, Config(values, None))
        content = companion.content(scene.config, None)
        assert content is not None
        write_companion(bench, content.decode())
        return scene

    @property
    def program(self) -> str:
        """Return the path by which the launcher is called."""
        return str(self.bench.workshop.build(self.build) / "gpu-container-runtime")

    @property
    def file(self) -> Path:
        """Return the path of the only replay file."""
        (path,) = self.bench.path("run").glob("replay-*")
        return path

    @property
    def bundle(self) -> Path:
        """Return the bundle of the launcher."""
        return self.bench.path("other/bundle")

    def caller(self, **changed: str) -> replay.Caller:
        """Return the identity and the PATH of the launcher, with the values *changed*."""
        status = Path(self.itself or self.program).stat()
        values = {
            "program": self.program,
            "identity": f"{status.st_dev}:{status.st_ino}",
            "path": self.bench.environment()["PATH"],
        }
        return replay.Caller(**{**values, **changed})

    def by_python(self, data: bytes) -> bytes | None:
        """Return the config.json that the shim makes of *data*; None if it refuses."""
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
        """Edit *data* by Python and record the edits for the launcher; return the result."""
        result = self.by_python(data)
        if result is None:
            return None
        run = str(self.bench.path("run"))
        saved = SavedGrants(run)
        saved.use(None, {})
        replay.keep(data, self.config, saved, caller or self.caller(), run)
        return result

    def create(self, data: bytes, *options: str, **variables: str) -> Outcome:
        """Create a container of the config.json *data* by the launcher."""
        shutil.rmtree(self.bundle, ignore_errors=True)
        self.bundle.mkdir(parents=True)
        (self.bundle / "config.json").write_bytes(data)
        return self.start(*options, **variables)

    def start(self, *options: str, **variables: str) -> Outcome:
        """Create the container of the unchanged bundle by the launcher."""
        return self.bench.runtime(
            *options,
            *("create", "--bundle", str(self.bundle), "c1"),
            build=self.build,
            env=self.bench.environment(**variables),
        )

    @property
    def written(self) -> bytes:
        """Return the current config.json; assert that the bundle has no other file."""
        assert [path.name for path in self.bundle.iterdir()] == ["config.json"]
        return (self.bundle / "config.json").read_bytes()

    def replays(self, data: bytes, *options: str, **variables: str) -> bool:
        """Return whether the launcher replays *data*; assert the same result as by Python."""
        program = self.create(data, *options, **variables).who
        if program == "lowlevel/runc":
            assert self.written == self.by_python(data)
            return True
        assert program == "python"
        assert self.written == data
        return False


def fields(data: bytes) -> list[bytes]:
    """Return the items of which *data* is the fields; raise ValueError if it is not."""
    items = []
    while data:
        number, _, rest = data.partition(b":")
        length = int(number)
        if rest[length : length + 1] != b"\n":
            raise ValueError("not a field")
        items.append(rest[:length])
        data = rest[length + 1 :]
    return items


def recorded(engine: str) -> bytes:
    """Return the config.json that *engine* wrote for a container with GPUs."""
    return (RECORDED / f"{engine}-gpu.json").read_bytes()


def mode_of(path: Path) -> tuple[int, int, int]:
    """Return the mode, owner and group of a file."""
    status = path.stat()
    return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
