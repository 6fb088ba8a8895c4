# SPDX-License-Identifier: Apache-2.0
"""Creates on the simulated host with a low-level runtime that only records that it was started.

For scenarios that change the host and examine the result of the next create.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drivers import OURS, TREE, run
from scenario import CONFIG, WORK
from ways import Way

RUN = Path("/run/gpuruntime")
SNAPSHOT = RUN / "inventory.json"
READY = RUN / "ready.json"
LIBRARIES = Path(f"/usr/lib/{platform.machine()}-linux-gnu")
# The configuration file of the fake NVML.
CONF = LIBRARIES / "fakenvml.conf"
ASKED = WORK / "asked"
LOG = WORK / "log"
# The discovery timeout for a driver that hangs, and for a driver that is only slow.
DEADLINE_S, PATIENCE_S = 2, 30
TIMEOUT_S = 60


class Creates:
    """Bundles for our runtime, which executes a program that records its descriptors."""

    def __init__(self) -> None:
        self.count = 0
        self.started = WORK / "started"
        self.started.mkdir()
        lowlevel = WORK / "runc"
        lowlevel.write_text(
            f'#!/bin/sh\nfor id; do :; done\nls -l /proc/$$/fd > "{self.started}/$id"\n'
        )
        lowlevel.chmod(0o755)
        self.base = {
            "discovery-timeout": PATIENCE_S,
            "nvidia-container-runtime.runtimes": [str(lowlevel)],
        }
        CONFIG.parent.mkdir(exist_ok=True)
        self.configure()
        self.conf = CONF.read_text()
        count_questions()

    def configure(self, **config: object) -> None:
        """Write *config* to config.toml."""
        CONFIG.write_text(Way(None, None, config={**self.base, **config}).toml)

    def fault(self, *lines: str) -> None:
        """Append *lines* to the original configuration of the fake NVML."""
        # In place: no fingerprint of a directory changes.
        CONF.write_text(self.conf + "".join(f"{line}\n" for line in lines))

    def create(self, devices: str | None = "1", **options: Any) -> dict[str, Any]:
        """Run `create` for a container that requests *devices*; see `start`."""
        return self.start(devices, **options).finish()

    def create_at_once(self, number: int, devices: str = "1") -> list[dict[str, Any]]:
        """Run *number* concurrent `create` commands and return their results."""
        calls = [self.start(devices) for _ in range(number)]
        return [call.finish() for call in calls]

    def start(
        self,
        devices: str | None,
        *,
        more: Sequence[str] = (),
        before: Sequence[str] = (),
        members: Mapping[str, object] | None = None,
    ) -> Call:
        """Start `create`; *before* precedes the command, *members* are added to config.json."""
        self.count += 1
        name = f"c{self.count}"
        bundle = WORK / f"bundle-{name}"
        bundle.mkdir()
        variables = [] if devices is None else [f"NVIDIA_VISIBLE_DEVICES={devices}"]
        document = {
            "ociVersion": "1.0.2",
            "process": {"args": ["/x"], "cwd": "/", "env": [*more, *variables]},
            "root": {"path": "rootfs"},
            **(members or {}),
        }
        (bundle / "config.json").write_text(json.dumps(document))
        return Call(bundle, self.started / name, before)


class Call:
    """A running `create` of *bundle*; the low-level runtime creates the file *started*."""

    def __init__(self, bundle: Path, started: Path, before: Sequence[str]) -> None:
        self.bundle = bundle
        self.started = started
        self.config = bundle / "config.json"
        self.text = self.config.read_text()
        self.asked = questions()
        self.began = time.monotonic()
        log = bundle / "log"
        self.process = subprocess.Popen(
            [*before, OURS, "--log", log, "create", "--bundle", bundle, started.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> dict[str, Any]:
        """Wait for the command and return its result.

        `asked`: how often NVML was loaded since the start; `made`: the identifier of the snapshot.
        """
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        text = self.config.read_text()
        document = json.loads(text)
        log = self.bundle / "log"
        return {
            "status": self.process.returncode,
            "stderr": errors,
            "log": log.read_text() if log.exists() else "",
            "seconds": time.monotonic() - self.began,
            "asked": questions() - self.asked,
            "made": made(),
            "started": self.started.exists(),
            "untouched": text == self.text,
            "devices": devices_of(document),
            "prestart": document.get("hooks", {}).get("prestart", []),
            "descriptors": descriptors(self.started),
        }


def devices_of(document: dict[str, Any]) -> dict[str, str]:
    """Return the devices of a config.json: path → major and minor number."""
    devices = document.get("linux", {}).get("devices", [])
    return {node["path"]: f"{node['major']}:{node['minor']}" for node in devices}


def descriptors(started: Path) -> list[str]:
    """Return the descriptors that the low-level runtime recorded: number and target."""
    if not started.exists():
        return []
    lines = [line.split(" -> ") for line in started.read_text().splitlines() if " -> " in line]
    # The inode numbers of pipes differ from one process to the next.
    return sorted(f"{left.split()[-1]} {right.partition(':[')[0]}" for left, right in lines)


def count_questions() -> None:
    """Replace the fake NVML by a library that counts in ASKED how often it is loaded."""
    ASKED.touch()
    library = (LIBRARIES / "libnvidia-ml.so.1").resolve()
    counted = WORK / library.name
    run(
        *("gcc", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1"),
        *("-I", TREE / "tests" / "simhost", "-o", counted, Path(__file__).with_name("counted.c")),
        # What counted.c includes is the first of these files.
        *sorted((TREE / "tests" / "simhost").glob("fakenvml_*.c")),
        *("-ldl", "-lpthread"),
    )
    library.unlink()
    shutil.copy(counted, library)


def questions() -> int:
    """Return how often NVML has been loaded."""
    return ASKED.stat().st_size


def made() -> str | None:
    """Return the identifier of the snapshot, unique to each discovery; None without a snapshot."""
    try:
        snapshot = json.loads(SNAPSHOT.read_text())
    except (OSError, ValueError):
        return None
    return str(snapshot["made"]) if isinstance(snapshot, dict) and "made" in snapshot else None


def forget() -> None:
    """Remove the cached inventory and the files derived from it."""
    for path in (*RUN.glob("inventory.*"), *RUN.glob(READY.name), *RUN.glob("replay-*")):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


@contextmanager
def replaced(path: Path, text: str) -> Iterator[None]:
    """Replace the content of the file *path* by *text*, in place, within the context."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def aside(*paths: Path) -> Iterator[None]:
    """Move *paths*, device nodes or files, away within the context."""
    directory = WORK / "aside"
    directory.mkdir()
    existing = [path for path in paths if os.path.lexists(path)]
    for path in existing:
        # WORK is another file system: `mv` creates the nodes again.
        run("mv", path, directory / path.name)
    try:
        yield
    finally:
        for path in existing:
            with suppress(FileNotFoundError):
                path.unlink()
            run("mv", directory / path.name, path)
        directory.rmdir()
