# SPDX-License-Identifier: Apache-2.0
"""`scenario.py`: on the simulated host, offer its GPUs to a real Kubernetes and start pods.

With the archive of `make image` as its argument, it also takes the node through the life that
`node_life.py` describes. Prints one JSON object with what pods and node have seen. All files are
in a tmpfs that ends with the host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import node_life
from cluster import NODE, Cluster, ClusterError, daemon_set, fail, pod, until

import deploy

BIN = Path(sys.prefix, "bin")
# Short, since paths of sockets are limited; not in /run, which the cluster has one of its own of.
WORK = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))
LOG = WORK / "plugin.log"
RUNTIME_CONFIG = Path("/etc/gpuruntime/config.toml")
MIG = WORK / "mig.yaml"
MIG_CONFIGS = """\
version: v1
mig-configs:
  small: [{devices: [3], mig-enabled: true, mig-devices: {1g.10gb: 7}}]
  disabled: [{devices: all, mig-enabled: false}]
"""
RESOURCE = "nvidia.com/gpu"
GPUS = 4
QUIET_S = 8
NODE_PROGRAM = str(BIN / "gpu-node")
PLUGIN = (NODE_PROGRAM, "device-plugin")
LOOK = "ls /dev/nvidia[0-9]*; env | grep NVIDIA_VISIBLE; exec sleep 1000"
SHARED_GPUS = f"{RESOURCE}.shared"
SHARED = f"""\
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - name: {RESOURCE}
      devices: [0]
      replicas: 3
"""
MPS_GPUS = f"{RESOURCE}.mps"
MPS = f"""\
version: v1
flags:
  mpsRoot: {WORK}/mps
sharing:
  mps:
    resources:
    - name: {RESOURCE}
      rename: {MPS_GPUS}
      devices: [1]
      replicas: 2
"""
# Answers as a control daemon of MPS, and changes no compute mode.
CONTROL = "#!/bin/sh\n[ $# != 0 ] || echo 50.0\n"
LOOK_FOR_MPS = f"env | grep CUDA_MPS; ls -d /mps/*/*/pipe; grep ' /dev/shm ' /proc/mounts; {LOOK}"
NODE_LABEL = "nvidia.com/device-plugin.config"
ACCEPT = "accept-nvidia-visible-devices"
MOUNTS_ONLY = f"{ACCEPT}-as-volume-mounts = true\n{ACCEPT}-envvar-when-unprivileged = false\n"


def started(cluster: Cluster, name: str, gpus: int, resource: str = RESOURCE) -> list[str]:
    """Start a pod with *gpus* of *resource* that stays; return what it sees."""
    return seen_by(cluster, pod(name, LOOK, {resource: gpus}))


def started_without_request(cluster: Cluster, name: str) -> list[str]:
    """Start a pod that requests nothing, but names all GPUs; return what it sees."""
    document = pod(name, LOOK, {})
    document["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    return seen_by(cluster, document)


def seen_by(cluster: Cluster, document: dict[str, Any]) -> list[str]:
    """Start a pod that executes LOOK; return what it prints."""
    name = document["metadata"]["name"]
    cluster.apply(document)
    until(lambda: cluster.phase(name) == "Running", f"pod {name} runs")
    until(lambda: "NVIDIA_VISIBLE" in cluster.logs(name), f"pod {name} writes")
    return cluster.logs(name).split()


def life(cluster: Cluster) -> dict[str, Any]:
    """Start pods around a restart of the kubelet, and while a GPU is sick."""
    results: dict[str, Any] = {}
    quiet = f"--health-quiet-time={QUIET_S}s"
    with cluster.process(LOG, *PLUGIN, quiet):
        cluster.until_amounts(RESOURCE, GPUS, GPUS)
        results["two"] = started(cluster, "two", 2)
        results["observed"] = observed(cluster)
        registrations = LOG.read_text().count("is registered with the kubelet")
        cluster.run("restart-kubelet")
        cluster.until_amounts(RESOURCE, GPUS, GPUS)
        results["registrations"] = (
            LOG.read_text().count("is registered with the kubelet") - registrations
        )
        results["two after restart"] = cluster.phase("two")
        results["others"] = started(cluster, "others", 2)
        cluster.delete("pod", "two", "others")
        make_sick(0)
        cluster.until_amounts(RESOURCE, GPUS, GPUS - 1)
        results["back after"] = cluster.until_amounts(RESOURCE, GPUS, GPUS)
    cluster.until_amounts(RESOURCE, GPUS, 0)
    return results


def observed(cluster: Cluster) -> dict[str, Any]:
    """Return what the other services say of the node while a pod has two of its GPUs."""
    options = ("--node-name", NODE, "--kubeconfig", cluster.kubeconfig)
    cluster.beside(NODE_PROGRAM, "feature-discovery", "--node-labels", "--oneshot", *options)
    components = ("--component=plugin,dra", "--json", "--output-dir=")
    return {
        "labels": cluster.get("node", NODE)["metadata"]["labels"],
        "metrics": cluster.beside(NODE_PROGRAM, "exporter", "--once"),
        "validation": json.loads(cluster.beside(NODE_PROGRAM, "validate", *components, *options)),
    }


def make_sick(gpu: int) -> None:
    """Have the driver report an XID of *gpu*."""
    configuration = Path(os.environ["SIMHOST_CONF"])
    text = configuration.read_text()
    new = configuration.with_suffix(".new")
    # Half a second after the file is there.
    new.write_text(f"{text}at 0.5 xid {gpu} 62\n")
    new.rename(configuration)


def shared(cluster: Cluster) -> dict[str, Any]:
    """Return what pods see of a shared GPU, by the config that the node's label names."""
    configs = WORK / "configs"
    configs.mkdir()
    (configs / "whole").write_text("version: v1\n")
    (configs / "shared").write_text(SHARED)
    node = {"directory": str(configs), "default": "whole", "node-name": NODE}
    node["kubeconfig"] = cluster.kubeconfig
    (configs / "mps").write_text(MPS)
    programs = WORK / "bin"
    programs.mkdir()
    for name in ("nvidia-cuda-mps-control", "nvidia-smi"):
        (programs / name).write_text(CONTROL)
        (programs / name).chmod(0o755)
    services = {"device-plugin": {"device-list-strategy": "volume-mounts"}, "mps-daemon": {}}
    config = WORK / "agent.yaml"
    config.write_text(json.dumps({"node-config": node, "services": services}))
    RUNTIME_CONFIG.parent.mkdir(exist_ok=True)
    RUNTIME_CONFIG.write_text(MOUNTS_ONLY)
    try:
        path = f"PATH={programs}:{os.environ['PATH']}"
        command = ("env", path, NODE_PROGRAM, "agent", "--config", str(config))
        with cluster.process(LOG, *command):
            cluster.until_amounts(RESOURCE, GPUS, GPUS)
            cluster.run("kubectl", "label", "node", NODE, f"{NODE_LABEL}=shared")
            cluster.until_amounts(SHARED_GPUS, 3, 3)
            cluster.until_amounts(RESOURCE, GPUS - 1, GPUS - 1)
            results: dict[str, Any] = {
                "one": started(cluster, "one", 1, SHARED_GPUS),
                "other": started(cluster, "other", 1, SHARED_GPUS),
                "none": started_without_request(cluster, "none"),
            }
            cluster.delete("pod", "one", "other", "none")
            cluster.apply(pod("refused", LOOK, {SHARED_GPUS: 2}))
            until(lambda: cluster.phase("refused") == "Failed", "the pod is refused")
            status = cluster.get("pod", "refused")["status"]
            cluster.delete("pod", "refused")
            cluster.run("kubectl", "label", "node", NODE, "--overwrite", f"{NODE_LABEL}=mps")
            cluster.until_amounts(MPS_GPUS, 2, 2)
            results["mps"] = seen_by(cluster, pod("mps", LOOK_FOR_MPS, {MPS_GPUS: 1}))
            cluster.delete("pod", "mps")
    finally:
        RUNTIME_CONFIG.unlink()
    # The control: with another config.toml it has all.
    results["all"] = started_without_request(cluster, "all")
    cluster.delete("pod", "all")
    return {**results, "reason": status["reason"], "message": status["message"]}


def in_pod(cluster: Cluster) -> dict[str, Any]:
    """Offer the GPUs from a pod of a DaemonSet."""
    cluster.until_amounts(RESOURCE, GPUS - 1, 0)
    variables = [f"{name}={os.environ[name]}" for name in ("SIMHOST_CONF", "PATH")]
    cluster.apply(daemon_set("plugin", ["/usr/bin/env", *variables, *PLUGIN]))
    try:
        cluster.until_amounts(RESOURCE, GPUS, GPUS)
        results = {"one": started(cluster, "of-daemon-set", 1)}
    except ClusterError as error:
        text = cluster.run("kubectl", "logs", "-l", "app=plugin")
        raise ClusterError(f"{error}\n{text}") from error
    cluster.delete("pod", "of-daemon-set")
    cluster.delete("daemonset", "plugin")
    return results


def partitioned(cluster: Cluster) -> dict[str, Any]:
    """Partition a GPU and undo it, while a label says that an operand runs."""
    MIG.write_text(MIG_CONFIGS)
    operand = "nvidia.com/gpu.deploy.dcgm"
    options = (f"--config-file={MIG}", f"--node-name={NODE}", f"--kubeconfig={cluster.kubeconfig}")
    states = {}
    with cluster.process(LOG, NODE_PROGRAM, "mig-manager", *options):
        for name in ("small", "disabled"):
            label = ("label", "node", NODE, "--overwrite")
            cluster.run("kubectl", *label, f"{operand}=yes", f"nvidia.com/mig.config={name}")
            until(
                lambda name=name: f"the GPUs have the MIG config {name}" in LOG.read_text(),
                f"the GPUs have the config {name}",
            )
            labels = cluster.get("node", NODE)["metadata"]["labels"]
            states[name] = [labels["nvidia.com/mig.config.state"], labels[operand]]
        events = cluster.run("kubectl", "describe", "node", NODE).partition("Events:")[2]
    cluster.run("kubectl", "label", "node", NODE, "nvidia.com/mig.config-")
    return {"states": states, "events": events}


def main() -> None:
    """Play all, and print the results."""
    if "SIMHOST" not in os.environ:
        sys.exit("scenario: run this on the simulated host: simhost.py run -- scenario.py")
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    # The cluster makes directories in /var/lib, which is also that of other tests.
    for place in (WORK, Path("/var/lib")):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "work", place], check=True)
    layer = node_life.layer_of_opt(WORK)
    node_life.share_kernel(WORK)
    cluster = Cluster(WORK / "s", BIN / "gpu-container-runtime")
    results: dict[str, Any] = {"namespace": os.readlink("/proc/self/ns/pid")}
    try:
        with cluster.up():
            for play in (
                life,
                shared,
                in_pod,
                partitioned,
                deploy.apply,
                deploy.rights,
                deploy.removal,
            ):
                results[play.__name__] = play(cluster)
            for archive in sys.argv[1:]:
                results["deployed"] = node_life.life(cluster, layer, archive)
    except ClusterError as error:
        fail(error, [LOG, *(WORK / "s/logs" / name for name in ("kubelet.log", "apiserver.log"))])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
