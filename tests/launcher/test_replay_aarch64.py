# SPDX-License-Identifier: Apache-2.0
"""The launcher for aarch64, under an emulator, answers again as the other one does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from launcher import replays, test_aarch64
from launcher.replays import Scene

from gpuruntime import probes
from gpuruntime.launcher import replay

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.conftest import Bench

# The fixtures of that module, which skips without an aarch64 launcher.
workshop = test_aarch64.workshop
bench = test_aarch64.bench


def test_it_gives_the_same_bytes(bench: Bench, tmp_path: Path) -> None:
    """With probes of each kind, whose system calls differ on aarch64."""
    scene = Scene.make(bench, "plain")
    scene.itself = test_aarch64.EMULATOR
    data = replays.recorded("docker")
    scene.remember(data)
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "node0")
    arguments = {
        "place": str(tmp_path),
        "exists": f"{tmp_path}/link",
        "link": f"{tmp_path}/link",
        "names": str(tmp_path),
        "nodes": f"{tmp_path}/node*",
    }
    parts = [*probes.read({name: [name, [of]] for name, of in arguments.items()}).values()]
    parts.append(["variable", {"PATH": bench.environment()["PATH"]}])
    more = replay.flat_probes(parts)
    assert more is not None
    content = scene.file.read_bytes()
    start = content.index(b"\n", content.index(b"\nuser ") + 1) + 1
    program, path, parts_before, answers, pieces = replays.fields(content[start:])
    file = replay.listed((program, path, parts_before, answers + more, pieces))
    scene.file.write_bytes(content[:start] + file)
    assert scene.replays(data)
    (tmp_path / "node0").unlink()
    assert not scene.replays(data)
