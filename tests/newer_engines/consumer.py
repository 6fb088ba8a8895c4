# SPDX-License-Identifier: Apache-2.0
"""`consumer.py ENGINE`: run containers with CDI devices, injected by the engine itself.

host.py starts it in the root directory of a newer suite, by the Python of that suite.
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
    """Return the options that request the devices *names*, the same for all engines."""
    return [word for name in names for word in ("--device", name)]


class NativePodman(Podman):
    """podman without our runtime."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, proc_driver=False)

    def attempt(self, names: list[str], *command: str) -> Done:
        """Run *command* in a container with the devices *names*."""
        words = [*self.words(None), *options(names)]
        done = self.client("run", "--rm", *words, image.NAME, *command, check=False)
        self.settle()
        return done


class NativeDocker(Docker):
    """docker with its own CDI enabled, which up to 28.1 is off by default."""

    settings: ClassVar[dict[str, Any]] = {"features": {"cdi": True}}

    def attempt(self, names: list[str], *command: str) -> Done:
        """Run *command* in a container with the devices *names*."""
        words = ["--network=none", "--hostname=box", *VARIABLES, *options(names)]
        return self.client("run", "--rm", *words, image.NAME, *command, check=False)


class NativeContainerd(Containerd):
    """containerd through ctr, which reads CDI specs itself."""

    def attempt(self, names: list[str], *command: str) -> Done:
        """Run *command* in a container with the devices *names*."""
        self.count += 1
        words = ["--cap-add", CAPABILITY, *VARIABLES, *options(names)]
        name = f"look-{self.count}"
        return self.client("run", "--rm", *words, image.NAME, name, *command, check=False)


ENGINES = {"podman": NativePodman, "docker": NativeDocker, "containerd": NativeContainerd}


def consume(engine: Any) -> dict[str, Any]:
    """Return the results of containers of *engine*: plain, with devices of the lab, with GPUs."""
    lab = labspec.Lab(WORK)
    results: dict[str, Any] = {"work": str(WORK)}
    shell = ("/bin/busybox", "sh", "-c")

    def look(*gpus: str) -> str:
        done = engine.attempt([f"nvidia.com/gpu={gpu}" for gpu in gpus], *image.LOOK)
        if done.returncode != 0:
            raise FailedError(f"{done.args}: status {done.returncode}\n{done.stderr}")
        return str(done.stdout)

    with engine.started():
        results["plain"] = look()
        with nothing_left(results):
            done = engine.attempt(labspec.names(), *shell, labspec.script())
            results["seen"] = result_of(done)
            results["hooks"] = lab.hooks_seen()
            newer = [f"{labspec.NEWER_KIND}=newer"]
            results["newer"] = result_of(engine.attempt(newer, *shell, labspec.NEWER_SCRIPT))
            results["asked"] = look(*GPUS)
            done = engine.attempt([f"{labspec.KIND}=none"], *shell, "true")
            results["unknown"] = result_of(done)
    results["namespace"] = os.readlink("/proc/self/ns/pid")
    results["host"] = host_nodes()
    return results


def result_of(done: Done) -> dict[str, Any]:
    """Return the result of a container, for JSON."""
    return {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def main() -> None:
    """Run the containers of the engine that the command line names."""
    try:
        results = consume(ENGINES[sys.argv[1]](WORK))
    except FailedError as error:
        sys.exit(f"consumer: {error}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
