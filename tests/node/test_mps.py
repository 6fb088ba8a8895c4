# SPDX-License-Identifier: Apache-2.0
"""MPS: the control daemons and the plugin's gate, with fake control programs on PATH."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from node.fake_kubelet import until
from node.node_host import NodeHost, uuid
from node.test_device_plugin import GPU, Node, healthy, play

from gpunode import mps_control
from gpunode.cli.device_plugin import load_config
from gpunode.config.effective import OptionText
from gpunode.mps_start import SHARED
from gpunode.services import mps_daemon, standalone
from gpunode.services.mps_daemon import MpsDaemon

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: a daemon has a mount namespace"
)
PATIENCE_S = 20
CONFIG = "version: v1\nsharing: {{mps: {{resources: [{{name: gpu, replicas: {0}}}]}}}}\n"
# Writes its name, arguments, pipe directory and standard input as one line; fails if it is to.
PROGRAM = """\
#!/bin/sh
name=${{0##*/}}
input=
[ $# != 0 ] || read -r input
at=${{CUDA_MPS_PIPE_DIRECTORY:+ @ $CUDA_MPS_PIPE_DIRECTORY}}
echo "$name${{*:+ $*}}${{input:+ < $input}}$at" >>{log}
[ ! -e {directory}/$name.fails ] || {{ echo "cannot reach the daemon"; exit 1; }}
[ "$1" != -d ] || ls /dev/shm >{directory}/memory
[ "$1" != -d ] || [ -d "$CUDA_MPS_PIPE_DIRECTORY" ] || exit 1
[ "$input" != get_default_active_thread_percentage ] || echo 50.0
"""


@pytest.fixture
def programs(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Yield a directory on PATH with the programs; their calls are in its file `log`."""
    directory = place / "bin"
    directory.mkdir()
    for name in ("nvidia-cuda-mps-control", "nvidia-smi", "mount", "umount"):
        text = PROGRAM.format(log=directory / "log", directory=directory)
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def calls(programs: Path) -> list[str]:
    """Return the calls of the programs, and forget them."""
    log = programs / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.write_text("")
    return lines


def run(
    place: Path,
    host: NodeHost,
    scenario: Callable[[MpsDaemon], Awaitable[None]],
    root: Path | None = None,
) -> None:
    """Play *scenario* while the service runs, and end it by its signal."""
    options = {"mps_root": str(root or place / "mps"), "nvidia_driver_root": str(host.root)}
    texts = {name: OptionText(text, f"--{name}") for name, text in options.items()}

    async def play_all() -> None:
        service = MpsDaemon(
            lambda: load_config(str(place / "config.yaml"), texts), watch=lambda _: host.watcher()
        )
        task = asyncio.create_task(standalone.run(service))
        try:
            await scenario(service)
            start = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)
            await task
            assert time.monotonic() - start < 5
        finally:
            task.cancel()

    asyncio.run(play_all())


# 81559 MiB, by whole divisions.
@needs_root
@pytest.mark.parametrize(
    ("replicas", "memory", "percent"), [(10, "8155M", "10"), (3, "27186M", "33")]
)
def test_the_daemon_is_started_and_stopped(
    place: Path, programs: Path, replicas: int, memory: str, percent: str
) -> None:
    """By exactly these commands; nothing of it is left."""
    (place / "config.yaml").write_text(CONFIG.format(replicas))
    root = place / "mps"
    (root / "shm").mkdir(parents=True)
    (root / "shm/of-clients").touch()
    control = "nvidia-cuda-mps-control"
    at = f" @ {root}/{GPU}/pipe"

    async def scenario(service: MpsDaemon) -> None:
        await until((root / ".ready").exists, PATIENCE_S)
        mount, *rest = calls(programs)
        assert mount.startswith("mount -t tmpfs -o rw,nosuid,nodev,noexec,relatime,size=")
        assert mount.endswith(f"k shm {root}/shm")
        start = [
            f"nvidia-smi -i {uuid(0)} -c EXCLUSIVE_PROCESS",
            f"nvidia-smi -i {uuid(1)} -c EXCLUSIVE_PROCESS",
            f"{control} -d{at}",
            f"{control} < set_default_device_pinned_mem_limit 0 {memory}{at}",
            f"{control} < set_default_device_pinned_mem_limit 1 {memory}{at}",
            f"{control} < set_default_active_thread_percentage {percent}{at}",
        ]
        assert rest == start
        assert (programs / "memory").read_text() == "of-clients\n"
        assert (root / GPU / ".started").exists()
        await until(lambda: service.report().is_ready, PATIENCE_S)

    run(place, NodeHost(place), scenario)
    quit_, *resets, umount = calls(programs)
    assert (quit_, umount) == (f"{control} < quit{at}", f"umount {root}/shm")
    assert sorted(resets) == [f"nvidia-smi -i {uuid(gpu)} -c DEFAULT" for gpu in (0, 1)]
    assert [path.name for path in root.rglob("*") if path.is_file()] == ["of-clients"]
    assert not (root / GPU).exists()


def test_memory_of_the_pod_is_shared_and_emptied(
    programs: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod cannot mount on the host: it has a volume, the memory of the clients, as /dev/shm."""
    (place / "config.yaml").write_text(CONFIG.format(2))
    root, outside = place / "mps", place / "outside"
    memory = root / "shm"
    memory.mkdir(parents=True)
    outside.mkdir()
    (outside / "file").touch()
    monkeypatch.setattr(mps_control, "_MOUNTED_ROOT", str(root))
    monkeypatch.setattr(mps_control, "SHARED", str(memory))

    async def scenario(_: MpsDaemon) -> None:
        await until((root / ".ready").exists, PATIENCE_S)
        assert memory.stat().st_mode & 0o7777 == 0o1777
        (memory / "directory").mkdir()
        (memory / "directory/file").touch()
        (memory / "link").symlink_to(outside)

    run(place, NodeHost(place), scenario)
    assert list(memory.iterdir()) == []
    assert (outside / "file").exists()
    assert not any(call.startswith(("mount", "umount")) for call in calls(programs))


def test_a_root_in_the_memory_of_the_host_is_refused(programs: Path, place: Path) -> None:
    """The daemon would not see its pipes: it has another /dev/shm."""
    (place / "config.yaml").write_text(CONFIG.format(2))
    root = Path(SHARED, f"mps-{os.getpid()}")

    async def scenario(service: MpsDaemon) -> None:
        await until(lambda: service.problem != "", PATIENCE_S)
        assert f'the MPS root "{root}" is in /dev/shm' in service.problem

    run(place, NodeHost(place), scenario, root)
    assert calls(programs) == []
    assert not root.exists()


def test_a_daemon_without_its_memory_is_one_line(place: Path) -> None:
    """No traceback; the program is not run."""
    command = (sys.executable, "-I", "-m", "gpunode.mps_start", str(place / "none"), "/bin/true")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f'cannot run /bin/true with "{place}/none" as /dev/shm: ')


@needs_root
def test_a_start_that_fails_is_put_back(place: Path, programs: Path) -> None:
    """And says which program has failed; a reload tries again at once."""
    (place / "config.yaml").write_text(CONFIG.format(2))
    (programs / "nvidia-smi.fails").touch()

    async def scenario(service: MpsDaemon) -> None:
        await until(lambda: service.problem, PATIENCE_S)
        assert "EXCLUSIVE_PROCESS has ended with status 1: cannot reach" in service.problem
        assert not (place / "mps/.ready").exists()
        await until(lambda: "umount" in (programs / "log").read_text(), PATIENCE_S)
        calls(programs)
        await asyncio.sleep(0.3)
        assert calls(programs) == []
        (programs / "nvidia-smi.fails").unlink()
        service.turns.reload()
        await until((place / "mps/.ready").exists, PATIENCE_S)

    run(place, NodeHost(place), scenario)


@needs_root
def test_only_what_has_changed_is_started_again(
    place: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload keeps the other resource's daemon; a daemon that no longer answers is restarted."""
    entry = "{{name: gpu, rename: {0}, replicas: {1}, devices: [{2}]}}"

    def write(replicas: int) -> None:
        entries = f"{entry.format('a', 2, 0)}, {entry.format('b', replicas, 1)}"
        text = f"version: v1\nsharing: {{mps: {{resources: [{entries}]}}}}\n"
        (place / "config.yaml").write_text(text)

    write(2)
    monkeypatch.setattr(mps_daemon, "_CHECK_S", 0.2)
    control, root = "nvidia-cuda-mps-control", place / "mps"
    a, b = (f" @ {root}/nvidia.com/{name}/pipe" for name in "ab")

    async def scenario(service: MpsDaemon) -> None:
        await until((root / ".ready").exists, PATIENCE_S)
        calls(programs)
        write(4)
        service.turns.reload()
        await until(lambda: "_percentage 25" in (programs / "log").read_text(), PATIENCE_S)
        changes = [line for line in calls(programs) if mps_control.QUESTION not in line]
        assert changes[:2] == [f"{control} < quit{b}", f"nvidia-smi -i {uuid(1)} -c DEFAULT"]
        assert not [line for line in changes if line.endswith(a)]
        assert service.report().details["daemons"] == ["nvidia.com/a", "nvidia.com/b"]

        (programs / f"{control}.fails").touch()
        await until(lambda: service.problem, PATIENCE_S)
        (programs / f"{control}.fails").unlink()
        calls(programs)
        service.turns.reload()
        await until(lambda: service.report().is_ready, PATIENCE_S)
        started = [line for line in calls(programs) if " -d " in line]
        assert sorted(started) == [f"{control} -d{a}", f"{control} -d{b}"]

    run(place, NodeHost(place), scenario)


def test_the_plugin_waits_for_the_daemon(place: Path, programs: Path) -> None:
    """Report K14: ready says what is missing, few questions are asked, and then units arrive."""
    node = Node(place, NodeHost(place), CONFIG.format(2), mps_root=str(place / "mps"))
    node.plugin.mps_gate.retry_s = node.plugin.mps_gate.check_s = 0.2

    async def reasons() -> str:
        return " ".join((await node.report())[1]["reasons"])

    async def until_reason(text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in await reasons():
            assert time.monotonic() < deadline, await reasons()
            await asyncio.sleep(0.05)

    async def scenario(node: Node) -> None:
        await until(lambda: node.plugin.mps_gate.problems, PATIENCE_S)
        await until_reason(f'the directory "{place}/mps/{GPU}/pipe" of the MPS control daemon')
        (programs / "nvidia-cuda-mps-control.fails").touch()
        (place / "mps" / GPU / "pipe").mkdir(parents=True)
        await until_reason("has ended with status 1: cannot reach the daemon")
        assert node.kubelet.live() == []
        calls(programs)
        await asyncio.sleep(1)
        assert 1 <= len(calls(programs)) <= 6
        (programs / "nvidia-cuda-mps-control.fails").unlink()
        await node.until_units(
            {GPU: healthy(*(f"{uuid(gpu)}::{n}" for gpu in (0, 1) for n in (0, 1)))}
        )
        assert (await node.report())[0] == 200

        # A daemon that ends later makes its units unhealthy, until it answers again.
        (programs / "nvidia-cuda-mps-control.fails").touch()
        ids = [f"{uuid(gpu)}::{n}" for gpu in (0, 1) for n in (0, 1)]
        await node.until_units({GPU: dict.fromkeys(ids, "Unhealthy")})
        await until_reason("has ended with status 1: cannot reach the daemon")
        (programs / "nvidia-cuda-mps-control.fails").unlink()
        await node.until_units({GPU: healthy(*ids)})

    play(node, scenario)
