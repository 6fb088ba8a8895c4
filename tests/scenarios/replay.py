# SPDX-License-Identifier: Apache-2.0
"""Create again without Python, on a host of which one thing changes at a time.

For the simulated host. Prints one JSON object. "engines": the config of an engine → whether the
first create by Python, the next by Python, and the one without are the same, and its length.
"changes": what has changed on the host → whether a create without Python was refused, with
config.json as it was, and whether there is one again after the next by Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scenario

CONFIGS = scenario.TREE / "tests" / "data" / "configs"
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
KEPT = Path("/run/gpuruntime")
VISIBLE = "NVIDIA_VISIBLE_DEVICES"


class Place:
    """A bundle, a config, and a low-level runtime that does nothing."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.document = top / "bundle" / "config.json"
        self.document.parent.mkdir()
        runtime = top / "runtime"
        runtime.write_text("#!/bin/sh\n")
        runtime.chmod(0o755)
        self.hook = top / "gpu-cdi-hook"
        shutil.copy("/bin/true", self.hook)
        self.config = top / "config.toml"
        self.config.write_text(
            f'[nvidia-container-runtime]\nruntimes = ["{runtime}"]\n'
            f'[nvidia-ctk]\npath = "{self.hook}"\n'
        )

    def create(self, data: bytes, fast: str = "") -> tuple[int, bytes]:
        """Create the container of *data*; return the status and what became of config.json."""
        self.document.write_bytes(data)
        done = subprocess.run(
            [scenario.RUNTIME, "create", "--bundle", str(self.document.parent), "one"],
            env={
                "PATH": "/usr/bin:/bin",
                "GPURUNTIME_CONFIG": str(self.config),
                "GPURUNTIME_FAST": fast,
            },
            capture_output=True,
            check=False,
        )
        return done.returncode, self.document.read_bytes()


def asking(engine: str, devices: str) -> bytes:
    """Return what *engine* writes for a container that asks for *devices*."""
    data = (CONFIGS / f"{engine}-gpu.json").read_bytes()
    return data.replace(b"=0,1", f"={devices}".encode())


def engines(place: Place) -> dict[str, Any]:
    """Create the containers of all engines."""
    found: dict[str, Any] = {}
    for engine in ("containerd", "cri", "docker", "podman"):
        for devices in ("all", "0,1", "none"):
            data = asking(engine, devices)
            by_python = place.create(data, "off")
            results = [place.create(data), place.create(data, "only")]
            found[f"{engine} {devices}"] = {
                "same": results == [by_python, by_python],
                "status": results[1][0],
                "changed": results[1][1] != data,
            }
    return found


def replace(path: Path) -> None:
    """Put a copy in place of *path*, with its times."""
    copy = path.with_name("copy-of-it")
    shutil.copy2(path.resolve(), copy)
    copy.rename(path)


def node(path: str, minor: int) -> None:
    """Make a character device at *path*."""
    Path(path).parent.mkdir(exist_ok=True)
    os.mknod(path, 0o20666, os.makedev(195, minor))


# What changes, in this order: each is there for the next.
CHANGES: dict[str, Callable[[Place], object]] = {
    "mode of a node": lambda _: os.chmod("/dev/nvidia0", 0o600),
    "owner of a node": lambda _: os.chown("/dev/nvidia1", 0, 44),
    "a node more": lambda _: node("/dev/nvidia9", 9),
    "a node fewer": lambda _: os.unlink("/dev/nvidia9"),
    "a channel": lambda _: node("/dev/nvidia-caps-imex-channels/channel7", 7),
    "a library more": lambda _: (LIBRARIES / "libnvidia-encode.so.550.163.02").touch(),
    "another libcuda": lambda _: replace(next(LIBRARIES.glob("libcuda.so.5*"))),
    "another loader cache": lambda _: os.utime("/etc/ld.so.cache"),
    "another hook": lambda place: replace(place.hook),
    "mode of the hook": lambda place: place.hook.chmod(0o750),
    "config": lambda place: os.utime(place.config),
}


def changes(place: Place) -> dict[str, Any]:
    """Change one thing at a time."""
    found: dict[str, Any] = {}
    data = asking("docker", "all")
    place.create(data)
    for name, change in CHANGES.items():
        before = place.create(data, "only")[0]
        change(place)
        refused = place.create(data, "only")
        by_python = place.create(data)
        again = place.create(data, "only")
        found[name] = {
            "before": before,
            "refused": refused[0] == 1 and refused[1] == data,
            "python": by_python[0],
            "same": again == by_python,
        }
    return found


def main() -> None:
    """Go through all, and print what was seen."""
    top = Path(tempfile.mkdtemp(prefix="gpuruntime-replay-"))
    top.chmod(0o755)
    try:
        place = Place(top)
        found = {"engines": engines(place), "changes": changes(place)}
    finally:
        shutil.rmtree(top)
        shutil.rmtree(KEPT, ignore_errors=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
