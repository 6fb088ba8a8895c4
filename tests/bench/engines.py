# SPDX-License-Identifier: Apache-2.0
"""Containers by docker and containerd, with runc and with our runtime. For the simulated host."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from typing import Any, ClassVar

import image
from bench.lives import PROGRAM, WORK, Spawner
from drivers import Containerd, Docker

SEED = 1
# Options of a container that requests all GPUs.
ALL_GPUS = ["--env", "NVIDIA_VISIBLE_DEVICES=all"]
TRUE = ("/bin/busybox", "true")


def take(spawner: Spawner, repetitions: int, runtimes: dict[str, str]) -> dict[str, Any]:
    """Return the samples of each case of each engine; None for an engine that is not installed.

    *runtimes* are other runtimes, name → path.
    """
    paths = {"ours": str(PROGRAM), **runtimes}
    samples: dict[str, Any] = {}
    for engine, daemons in (
        ("docker", ("dockerd", "docker")),
        ("containerd", ("containerd", "ctr")),
    ):
        if not all(map(shutil.which, daemons)):
            samples[engine] = None
            continue
        work = WORK / engine
        work.mkdir()
        with {"docker": _docker, "containerd": _containerd}[engine](work, paths) as command:
            samples[engine] = _interleaved(spawner, repetitions, command, paths)
        shutil.rmtree(work, ignore_errors=True)
    return samples


@contextlib.contextmanager
def _docker(work: Any, paths: dict[str, str]) -> Iterator[Any]:
    class Ours(Docker):
        settings: ClassVar[dict[str, Any]] = {
            "runtimes": {name: {"path": path} for name, path in paths.items()}
        }

    engine = Ours(work)

    def command(name: str, request: list[str], number: int) -> list[str]:
        words = ["run", "--rm", "--network=none", f"--runtime={name}", *request, image.NAME, *TRUE]
        return [str(shutil.which("docker")), "-H", engine.socket, *words]

    with engine.started():
        yield command


@contextlib.contextmanager
def _containerd(work: Any, paths: dict[str, str]) -> Iterator[Any]:
    engine = Containerd(work)

    def command(name: str, request: list[str], number: int) -> list[str]:
        words = ["run", "--rm", "--runc-binary", paths.get(name, name), *request]
        ctr = [str(shutil.which("ctr")), "--address", engine.socket]
        return [*ctr, *words, image.NAME, f"bench-{number}", *TRUE]

    with engine.started():
        yield command


def _interleaved(
    spawner: Spawner, repetitions: int, command: Any, paths: dict[str, str]
) -> dict[str, list[Any]]:
    cases: list[tuple[str, str, list[str]]] = [("runc", "runc", [])]
    for name in paths:
        cases += [(f"{name}, no GPU", name, []), (f"{name}, 8 GPUs", name, ALL_GPUS)]
    samples: dict[str, list[Any]] = {name: [] for name, _, _ in cases}
    order = random.Random(SEED)
    number = 0
    for repetition in range(-1, repetitions):
        for name, runtime, request in order.sample(cases, len(cases)):
            number += 1
            sample = spawner.time(command(runtime, request, number), dict(os.environ))
            if repetition >= 0:
                samples[name].append(sample)
    return samples
