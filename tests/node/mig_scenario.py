# SPDX-License-Identifier: Apache-2.0
"""`mig_scenario.py`: on the simulated host, an agent changes MIG, and all that follows is read.

Prints one JSON object: the same facts before the change and after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "containers")]
import drivers  # noqa: E402
from node.fake_kubelet import FakeKubelet, until  # noqa: E402
from node.fake_node_api import NODE, FakeNodeApi  # noqa: E402

BIN = Path(sys.prefix, "bin")
WORK = Path(tempfile.mkdtemp())
LABEL, STATE = "nvidia.com/mig.config", "nvidia.com/mig.config.state"
PLUGIN = "nvidia.com/gpu.deploy.device-plugin"
METRICS = 9400
PATIENCE_S = 30.0
CONFIGS = """\
version: v1
mig-configs:
  mixed:
  - {devices: [1], mig-enabled: true, mig-devices: {"1g.10gb": 2, "3g.40gb": 1}}
"""
AGENT = f"""\
version: v1
services:
  device-plugin:
    kubelet-socket: {WORK}/kubelet/kubelet.sock
    cdi-spec-dir: {WORK}/cdi
    device-list-strategy: cdi-cri
    mig-strategy: mixed
  feature-discovery:
    output-file: {WORK}/labels
    use-node-feature-api: false
    mig-strategy: mixed
  exporter:
    listen: 127.0.0.1:{METRICS}
    kubernetes: false
  mig-manager:
    config-file: {WORK}/configs.yaml
    node-name: {NODE}
    kubeconfig: {WORK}/kubeconfig
    pause-file: {WORK}/pause.json
    state-directory: {WORK}/state
"""


def labels() -> dict[str, str]:
    """Return the labels of the file that say how many units of each kind there are."""
    lines = (WORK / "labels").read_text().splitlines() if (WORK / "labels").exists() else []
    pairs = dict(line.split("=", 1) for line in lines)
    return {name: value for name, value in pairs.items() if name.endswith(".count")}


def instances() -> list[str]:
    """Return the MIG profiles of the series of memory in a scrape."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return []
    series = [line for line in text.splitlines() if line.startswith("DCGM_FI_DEV_FB_USED{")]
    key = 'GPU_I_PROFILE="'
    return sorted(line.partition(key)[2].partition('"')[0] for line in series)


def cdi(path: Path) -> list[str]:
    """Return the names of the devices in a CDI spec."""
    if not path.exists():
        return []
    done = subprocess.run(
        [BIN / "gpuruntime", "cdi", "list", f"--spec-dir={path.parent}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return sorted(line.strip() for line in done.stdout.splitlines() if "=" in line)


def children(pid: int) -> list[str]:
    """Return the processes that *pid* has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def facts(kubelet: FakeKubelet, bench: drivers.Bundle) -> dict[str, Any]:
    """Return what each service and a container with all devices says of the GPUs."""
    units = {
        one.request.resource_name: len(one.devices)
        for one in kubelet.connections
        if not one.is_ended
    }
    return {
        "labels": labels(),
        "metrics": instances(),
        "units": {name: count for name, count in units.items() if name in kubelet.live()},
        "spec of the host": cdi(Path("/var/run/cdi/nvidia.yaml")),
        "spec of the plugin": cdi(WORK / "cdi/k8s.device-plugin.nvidia.com-gpu.json"),
        "container": await asyncio.to_thread(bench.run, "all"),
    }


async def play(kubeconfig: Path) -> dict[str, Any]:
    """Play the scenario, and return the facts."""
    api = FakeNodeApi({PLUGIN: "false"})
    kubelet = FakeKubelet(WORK / "kubelet")
    bench = drivers.Bundle(WORK)
    results: dict[str, Any] = {"namespace": os.readlink("/proc/self/ns/pid")}
    with api.config(kubeconfig):
        await kubelet.start()
        process = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
            [BIN / "gpu-node", "agent", f"--config={WORK}/agent.yaml"], stderr=sys.stderr
        )
        try:
            await until(lambda: set(kubelet.live()) == {"nvidia.com/gpu"}, PATIENCE_S)
            await until(lambda: bool(labels()) and bool(instances()), PATIENCE_S)
            results["watched by"] = [children(process.pid)]
            results["before"] = await facts(kubelet, bench)
            api.set(LABEL, "mixed")
            await until(lambda: api.labels.get(STATE) == "success", PATIENCE_S)
            await until(lambda: len(kubelet.live()) == 3, PATIENCE_S)
            await until(lambda: len(labels()) == 3 and any(instances()), PATIENCE_S)
            results["watched by"].append(children(process.pid))
            results["after"] = await facts(kubelet, bench)
        finally:
            process.terminate()
            results["status"] = process.wait(10)
            await kubelet.stop()
    return results


def main() -> None:
    """Prepare the files, play, and print the results."""
    (WORK / "kubelet").mkdir()
    (WORK / "configs.yaml").write_text(CONFIGS)
    (WORK / "agent.yaml").write_text(AGENT)
    WORK.chmod(0o755)
    subprocess.run(
        [BIN / "gpuruntime", "cdi", "generate", "--output=/var/run/cdi/nvidia.yaml"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    print(json.dumps(asyncio.run(play(WORK / "kubeconfig"))))


if __name__ == "__main__":
    main()
