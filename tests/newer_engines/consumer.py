# SPDX-License-Identifier: Apache-2.0
"""`consumer.py ENGINE`: containers with devices of the specs that are there, by the engine's CDI.

Runs as host.py leaves it: in the root directory of a newer suite, by that suite's Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "containers"))

import image
import labspec
from drivers import CAPABILITY, USERS, Containerd, Docker, FailedError, Podman
from scenario import WORK, host_nodes, nothing_left

GPUS = ("1", "3")
VARIABLES = [word for entry in USERS for word in ("--env", entry)]
Done = subprocess.CompletedProcess[str]


def options(names: list[str]) -> list[str]:
    """Return the options that ask for the devices *names*; these engines agree on them."""
    return [word for name in names for word in ("--device", name)]


class NativePodman(Podman):
    """podman as it is."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, proc_driver=False)

    def attempt(self, names: list[str], *command: str) -> Done:
        """Run *command* in a container that has the devices *names*."""
        words = [*self.words(None), *options(names)]
        done = self.client("run", "--rm", *words, image.NAME, *command, check=False)
        self.settle()
        return done


class NativeDocker(Docker):
    """docker with its own CDI turned on, as it has to be up to 28.1."""

    settings: ClassVar[dict[str, Any]] = {"features": {"cdi": True}}

    def attempt(self, names: list[str], *command: str) -> Done:
        """Run *command* in a container that has the devices *names*."""
        words = ["--network=none", "--hostname=box", *VARIABLES, *options(names)]
        return self.client("run", "--rm", *words, image.NAME, *command, check=False)


class NativeContainerd(Containerd):
    """containerd by ctr, which reads CDI specs itself."""

    def attempt(self, names: list[str], *command: str) -> Done:
        """Run *command* in a container that has the devices *names*."""
        self.count += 1
        words = ["--cap-add", CAPABILITY, *VARIABLES, *options(names)]
        name = f"look-{self.count}"
        return self.client("run", "--rm", *words, image.NAME, name, *command, check=False)


ENGINES = {"podman": NativePodman, "docker": NativeDocker, "containerd": NativeContainerd}


def consume(engine: Any) -> dict[str, Any]:
    """Return what containers of *engine* were: with the lab's devices, with GPUs, without."""
    lab = labspec.Lab(WORK)
    found: dict[str, Any] = {"work": str(WORK)}
    shell = ("/bin/busybox", "sh", "-c")

    def look(*gpus: str) -> str:
        done = engine.attempt([f"nvidia.com/gpu={gpu}" for gpu in gpus], *image.LOOK)
        if done.returncode != 0:
            raise FailedError(f"{done.args}: status {done.returncode}\n{done.stderr}")
        return str(done.stdout)

    with engine.started():
        found["plain"] = look()
        with nothing_left(found):
            done = engine.attempt(labspec.names(), *shell, labspec.script())
            found["seen"] = answer(done)
            found["hooks"] = lab.hooks_seen()
            newer = [f"{labspec.NEWER_KIND}=newer"]
            found["newer"] = answer(engine.attempt(newer, *shell, labspec.NEWER_SCRIPT))
            found["asked"] = look(*GPUS)
            done = engine.attempt([f"{labspec.KIND}=none"], *shell, "true")
            found["unknown"] = answer(done)
    found["namespace"] = os.readlink("/proc/self/ns/pid")
    found["host"] = host_nodes()
    return found


def answer(done: Done) -> dict[str, Any]:
    """Return what came of a container, for JSON."""
    return {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def main() -> None:
    """Use the engine that the command line names."""
    try:
        found = consume(ENGINES[sys.argv[1]](WORK))
    except FailedError as error:
        sys.exit(f"consumer: {error}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
