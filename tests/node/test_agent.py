# SPDX-License-Identifier: Apache-2.0
"""The agent as a program: a simulated driver, a fake kubelet, and three services."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node.fake_api_server import FakeApiServer
from node.fake_kubelet import FakeKubelet, until
from node.node_host import NodeHost, uuid
from node.ports import free_port
from node.rights import can_nobody_run, status_of
from node.test_exporter import FakePodResources

from gpunode.cli import agent_services
from gpunode.config import named
from gpuruntime.errors import ConfigError

PATIENCE_S = 30
GPU = "nvidia.com/gpu"
NODE = "/api/v1/nodes/n1"


@pytest.fixture
def pods(place: Path) -> Iterator[FakePodResources]:
    """Yield the pods of a kubelet whose socket only root can use."""
    fake = FakePodResources(place / "k.sock")
    yield fake
    fake.server.stop(None)


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


def command_line(pid: int) -> bytes:
    """Return the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def listeners(pid: int) -> set[int]:
    """Return the TCP ports that a process listens on."""
    own = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(row[1].split(":")[1], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in own
    }


def test_the_services_share_a_watcher(place: Path, pods: FakePodResources) -> None:
    """A reload keeps the registration, and so does the end of the child, which comes again."""
    host = NodeHost(place)
    health, metrics = free_port(), free_port()
    (place / "kubelet").mkdir()
    pods.list("train", uuid(1))
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
    pod-resources-socket: {place}/k.sock
"""
    )

    def state(name: str) -> dict[str, Any]:
        content: dict[str, Any] = report(health).get("services", {}).get(name, {})
        return content

    async def scenario() -> None:
        kubelet = FakeKubelet(place / "kubelet")
        await kubelet.start()
        process = subprocess.Popen(command(config))  # noqa: ASYNC220 (it returns at once)
        try:
            await until(lambda: report(health).get("ready"), PATIENCE_S)
            pids = children(process.pid)
            # What parses and serves, which has no rights, and the process that calls NVML.
            assert len(pids) == 2
            child = next(pid for pid in pids if b"agent_child" in command_line(pid))
            if os.geteuid() == 0:
                status = status_of(child)
                assert status["CapEff"] == "0000000000000000"
                assert not can_nobody_run() or "0" not in status["Uid"].split()
            assert listeners(process.pid) & {health, metrics} == set()
            assert listeners(child) == {health, metrics}
            assert "nvidia.com/gpu.count=2\n" in (place / "labels").read_text()
            # Through the socket that only root can use.
            await until(lambda: 'pod="train"' in get(metrics, "/metrics"), PATIENCE_S)
            assert 'gpu_node_service_ready{service="exporter"} 1.0' in get(health, "/metrics")

            before = len(kubelet.connections)
            plugin_config.write_text(
                "version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 3}]}}\n"
            )
            process.send_signal(signal.SIGHUP)
            await until(
                lambda: state("device-plugin").get("resources", {}).get(GPU, {}).get("units") == 6,
                PATIENCE_S,
            )
            await until(lambda: "gpu.replicas=3" in (place / "labels").read_text(), PATIENCE_S)
            plugin_config.write_text("nonsense: 1\n")
            process.send_signal(signal.SIGHUP)
            for name in ("device-plugin", "feature-discovery"):
                await until(lambda: "nonsense" in state(name).get("config_error", ""), PATIENCE_S)  # noqa: B023

            os.kill(child, signal.SIGKILL)
            ends = {"unprivileged": {"restarts": 1, "last_end": "signal 9"}}
            await until(lambda: report(health).get("processes") == ends, PATIENCE_S)
            plugin_config.write_text("version: v1\n")
            process.send_signal(signal.SIGHUP)
            await until(lambda: 'pod="train"' in get(metrics, "/metrics"), PATIENCE_S)
            assert len(kubelet.connections) == before

            pids = children(process.pid)
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


def node(label: str | None) -> dict[str, Any]:
    """Return a node whose label names the config *label*."""
    labels = {} if label is None else {named.NODE_LABEL: label}
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {"name": "n1", "resourceVersion": "1", "labels": labels},
    }


def test_the_label_of_the_node_chooses_the_config(place: Path) -> None:
    """Without the label it is the default; a wrong name changes nothing, and is reported."""
    host = NodeHost(place)
    health = free_port()
    (place / "kubelet").mkdir()
    configs = place / "configs"
    configs.mkdir()
    (configs / "whole").write_text("version: v1\n")
    sharing = (
        "version: v1\nsharing: {{timeSlicing: {{resources: [{{name: gpu, replicas: {0}}}]}}}}\n"
    )
    for replicas in (2, 4):
        (configs / f"by-{replicas}").write_text(sharing.format(replicas))
    server = FakeApiServer({NODE: node("by-4")})
    config = place / "agent.yaml"
    config.write_text(
        f"""\
driver-root: {host.root}
healthz: 127.0.0.1:{health}
node-config: {{directory: {configs}, default: whole, node-name: n1, kubeconfig: {place}/kube}}
services:
  device-plugin:
    kubelet-socket: {place}/kubelet/kubelet.sock
    cdi-spec-dir: {place}/cdi
    device-list-strategy: envvar
"""
    )

    async def until_units(count: int) -> None:
        def units() -> int | None:
            service = report(health).get("services", {}).get("device-plugin", {})
            found: int | None = service.get("resources", {}).get(GPU, {}).get("units")
            return found

        await until(lambda: units() == count, PATIENCE_S)

    async def scenario() -> None:
        kubelet = FakeKubelet(place / "kubelet")
        await kubelet.start()
        process = subprocess.Popen(command(config))  # noqa: ASYNC220 (it returns at once)
        try:
            await until_units(8)
            await until(lambda: report(health).get("ready"), PATIENCE_S)
            server.change(NODE, node("by-2"))
            await until_units(4)
            server.change(NODE, node("by-3"))
            await until(lambda: report(health).get("config", {}).get("problem"), PATIENCE_S)
            assert report(health)["reasons"] == [
                'config: the label of the node names the config "by-3", which does not exist'
            ]
            await until_units(4)
            server.change(NODE, node(None))
            await until_units(2)
            assert report(health)["ready"]
            assert len(kubelet.connections) == 1
        finally:
            process.terminate()
            process.wait()
            await kubelet.stop()

    with server.config(place / "kube"):
        asyncio.run(scenario())


def test_an_error_of_a_service_at_start_ends_the_agent(tmp_path: Path) -> None:
    """With one line and a hint: two driver roots, of which one is watched."""
    (tmp_path / "plugin.yaml").write_text("flags: {nvidiaDriverRoot: /other}\n")
    config = tmp_path / "agent.yaml"
    config.write_text(f"config-file: {tmp_path}/plugin.yaml\nservices: {{device-plugin: {{}}}}\n")
    done = subprocess.run(
        command(config), capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        'error: configuration: the device plugin has the driver root "/other", and the agent "/"',
        'hint: set "driver-root" in the config of the agent',
    ]


def test_options_of_commands_are_keys(tmp_path: Path) -> None:
    """Flags take true and false; the agent has defaults of its own."""
    config = tmp_path / "agent.yaml"
    config.write_text(
        "services:\n  feature-discovery: {node-labels: true, no-timestamp: false}\n"
        "  device-plugin: {pass-device-specs: true, imex-channel-ids: 0}\n"
    )
    file = agent_services.read(str(config))
    assert agent_services.arguments(file, "feature-discovery") == ["--node-labels"]
    assert agent_services.arguments(file, "device-plugin") == [
        *("--device-list-strategy=auto", "--pass-device-specs=true", "--imex-channel-ids=0"),
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("version: v1\n", 'line 1: the file has no "services"'),
        ("services: {nonsense: {}}\n", 'unknown key "services.nonsense"'),
        ("services:\n  exporter: {listn: a}\n", 'line 2: cannot use "services.exporter": No such'),
        ("services:\n  exporter: {healthz: a}\n", "not a setting of one service"),
        ("healthz: 7\nservices: {exporter: {}}\n", 'line 1: "healthz" is 7, not HOST:PORT'),
        (
            "node-config: {directory: /d, fallback-strategies: [x]}\nservices: {exporter: {}}\n",
            'line 1: "node-config.fallback-strategies[0]" is "x", not named, single or empty',
        ),
    ],
)
def test_a_config_that_is_refused(tmp_path: Path, text: str, error: str) -> None:
    """Before anything is started, with the file, the line and the key."""
    config = tmp_path / "agent.yaml"
    config.write_text(text)

    def read() -> None:
        file = agent_services.read(str(config))
        for name in file.get(("services",)):
            agent_services.arguments(file, name)

    with pytest.raises(ConfigError, match=re.escape(error)):
        read()
