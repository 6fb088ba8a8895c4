# SPDX-License-Identifier: Apache-2.0
"""Measure `gpu-node agent` with all of its services on a simulated host of 8 GPUs, 7 MIG each.

Prints the proportional set size of its processes, and their wake-ups a second while nothing
happens. Labels go to an API server, whose node names the config; the exporter asks for the pods.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from bench import simulated
from bench.device_plugin import IDLE_S, SETTLE_S, START_S, family, memory, switches
from node.fake_api_server import FakeApiServer
from node.fake_kubelet import FakeKubelet, until
from node.test_exporter import FakePodResources

from gpunode.cli.agent_services import SERVICES
from gpunode.config.named import NODE_LABEL

NODE = "/api/v1/nodes/n1"
HEALTH, METRICS = "127.0.0.1:18081", "127.0.0.1:19400"
CONFIG = """\
version: v1
flags: {migStrategy: single}
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 8}]}}
"""
MIG = "version: v1\nmig-configs: {all-disabled: [{devices: all, mig-enabled: false}]}\n"
# The options that a service needs here.
OPTIONS = {
    "device-plugin": "{{kubelet-socket: {0}/s/kubelet.sock, device-list-strategy: cdi-cri}}",
    "feature-discovery": "{{node-labels: true, node-name: n1, kubeconfig: {0}/kube}}",
    "mig-manager": "{{config-file: {0}/mig.yaml, node-name: n1, kubeconfig: {0}/kube, "
    "pause-file: {0}/pause.json, state-directory: {0}/state}}",
    "exporter": "{{listen: '{1}', pod-resources-socket: {0}/k.sock}}",
}
# The most that the project allows itself.
LIMITS = {"memory, MiB": 90.0, "wake-ups a second": 4.0}


def agent_config(directory: Path) -> str:
    """Return a config with all services."""
    section = f"{{directory: {directory}/c, node-name: n1, kubeconfig: {directory}/kube}}"
    lines = [f"healthz: '{HEALTH}'", f"node-config: {section}", "services:"]
    lines += [
        f"  {name}: {OPTIONS.get(name, '{{}}')}".format(directory, METRICS) for name in SERVICES
    ]
    return "\n".join(lines)


def is_ok(page: str) -> bool:
    """Return whether *page* is served with the status 200."""
    try:
        with urllib.request.urlopen(f"http://{page}", timeout=5):
            return True
    except OSError:
        return False


async def measure(directory: Path) -> dict[str, float]:
    """Return the figures by the names of LIMITS."""
    (directory / "c").mkdir()
    (directory / "c/default").write_text(CONFIG)
    (directory / "s").mkdir()
    (directory / "mig.yaml").write_text(MIG)
    config = directory / "agent.yaml"
    config.write_text(agent_config(directory))
    kubelet = FakeKubelet(directory / "s")
    await kubelet.start()
    pods = FakePodResources(directory / "k.sock")
    pods.list("train", "GPU-0")
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.prefix, "bin", "gpu-node")), "agent", f"--config={config}")
    )
    try:
        await until(lambda: bool(kubelet.live()), START_S)
        for _ in range(int(START_S)):
            if await asyncio.to_thread(is_ok, f"{HEALTH}/readyz"):
                break
            await asyncio.sleep(1)
        assert await asyncio.to_thread(is_ok, f"{METRICS}/metrics")
        await asyncio.sleep(SETTLE_S)
        pids = family(process.pid)
        before = switches(pids)
        await asyncio.sleep(IDLE_S)
        wake_ups = (switches(pids) - before) / IDLE_S
        return dict(zip(LIMITS, (memory(pids), wake_ups), strict=True))
    finally:
        process.terminate()
        await process.wait()
        pods.server.stop(None)
        await kubelet.stop()


def inside() -> None:
    """Measure on this simulated host, and print a table."""
    directory = Path(tempfile.mkdtemp(prefix="a", dir="/tmp"))
    directory.chmod(0o755)
    node: dict[str, Any] = {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {"name": "n1", "resourceVersion": "1", "labels": {NODE_LABEL: "default"}},
    }
    with FakeApiServer({NODE: node}).config(directory / "kube"):
        figures = asyncio.run(measure(directory))
    print(f"agent with {', '.join(SERVICES)}, 8 GPUs with 7 MIG devices each")
    for name, limit in LIMITS.items():
        print(f"{name:20}{figures[name]:>12.2f}{limit:>12.2f}")


if __name__ == "__main__":
    simulated.run(inside, __file__)
