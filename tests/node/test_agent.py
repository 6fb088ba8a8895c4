# SPDX-License-Identifier: Apache-2.0
"""The agent as a program: a simulated driver, a fake kubelet, and three services."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node.fake_kubelet import FakeKubelet, until
from node.node_host import NodeHost

from gpunode.cli import agent
from gpuruntime.errors import ConfigError

PATIENCE_S = 30
GPU = "nvidia.com/gpu"


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a directory with a short path, which every user can search."""
    path = Path(tempfile.mkdtemp(prefix="a", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        port: int = stream.getsockname()[1]
        return port


def command(config: Path) -> list[str]:
    """Return the command line of the agent."""
    program = "import sys; from gpunode.cli.main import main; sys.argv[0] = 'gpu-node'; main()"
    return [sys.executable, "-c", program, "agent", f"--config={config}"]


def get(port: int, path: str) -> str:
    """Return the body that a server answers with, "" while there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def report(port: int) -> dict[str, Any]:
    """Return the agent's report, an empty one while it does not answer."""
    content: dict[str, Any] = json.loads(get(port, "/healthz") or "{}")
    return content


def children(pid: int) -> list[int]:
    """Return the processes that *pid* has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def owner(pid: int) -> int:
    """Return the user id of a process."""
    return Path(f"/proc/{pid}").stat().st_uid


def test_the_services_share_a_watcher(place: Path) -> None:
    """A reload keeps the registration; SIGTERM ends all processes."""
    host = NodeHost(place)
    health, metrics = free_port(), free_port()
    (place / "kubelet").mkdir()
    plugin_config = place / "plugin.yaml"
    plugin_config.write_text("version: v1\n")
    config = place / "agent.yaml"
    config.write_text(
        f"""\
version: v1
driver-root: {host.root}
config-file: {plugin_config}
healthz: 127.0.0.1:{health}
services:
  device-plugin:
    kubelet-socket: {place}/kubelet/kubelet.sock
    cdi-spec-dir: {place}/cdi
    device-list-strategy: envvar
  feature-discovery:
    output-file: {place}/labels
    use-node-feature-api: false
  exporter:
    listen: 127.0.0.1:{metrics}
    kubernetes: false
"""
    )

    async def scenario() -> None:
        kubelet = FakeKubelet(place / "kubelet")
        await kubelet.start()
        process = subprocess.Popen(command(config))  # noqa: ASYNC220 (it returns at once)
        try:
            await until(lambda: report(health).get("ready"), PATIENCE_S)
            pids = children(process.pid)
            # The exporter, which is not root, and the process that calls NVML.
            assert len(pids) == 2
            if os.geteuid() == 0 and owner(pids[0]) == 0:
                assert "CapEff:\t0000000000000000" in Path(f"/proc/{pids[0]}/status").read_text()
            assert "nvidia.com/gpu.count=2\n" in (place / "labels").read_text()
            await until(lambda: "DCGM_FI_DEV_GPU_TEMP{" in get(metrics, "/metrics"), PATIENCE_S)
            assert 'gpu_node_service_ready{service="exporter"} 1.0' in get(health, "/metrics")

            before = len(kubelet.connections)
            plugin_config.write_text(
                "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 3}]}}\n"
            )
            process.send_signal(signal.SIGHUP)
            await until(
                lambda: (
                    report(health)["services"]["device-plugin"]["resources"][GPU]["units"] == 6
                ),
                PATIENCE_S,
            )
            await until(lambda: "gpu.replicas=3" in (place / "labels").read_text(), PATIENCE_S)
            assert len(kubelet.connections) == before
            assert children(process.pid) == pids

            start = time.monotonic()
            process.terminate()
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
            assert time.monotonic() - start < 5
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
            assert [path.name for path in (place / "kubelet").iterdir()] == ["kubelet.sock"]
        finally:
            process.kill()
            process.wait()
            await kubelet.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("version: v1\n", 'line 1: "" has no "services"'),
        ("services: {nonsense: {}}\n", 'unknown key "services.nonsense"'),
        ("services:\n  exporter: {listn: a}\n", 'line 2: cannot use "services.exporter": No such'),
        ("services:\n  exporter: {healthz: a}\n", "not a setting of one service"),
        ("healthz: 7\nservices: {exporter: {}}\n", 'line 1: "healthz" is 7, not HOST:PORT'),
    ],
)
def test_a_config_that_is_refused(tmp_path: Path, text: str, error: str) -> None:
    """Before anything is started, with the file, the line and the key."""
    config = tmp_path / "agent.yaml"
    config.write_text(text)

    def read() -> None:
        file = agent.read(str(config))
        for name in file.get(("services",)):
            agent.context(file, name)

    with pytest.raises(ConfigError, match=re.escape(error)):
        read()
