# SPDX-License-Identifier: Apache-2.0
"""The part of `scenario.py` that takes the node from nothing to pods with GPUs, and back.

It needs the archive of `make image`, which the pods of `deploy/` are made from.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import images
import yaml
from cluster import NODE, Cluster, ClusterError, pod, until

from deploy import DEPLOY, SPACE

RESOURCE = "nvidia.com/gpu"
GPUS = 4
# What the kubelet writes beside the sockets of device plugins.
OF_KUBELET = ("kubelet.sock", "kubelet_internal_checkpoint")
# Directories of the host that an installation writes to.
OPT, STATE = Path("/opt"), Path("/var/lib")


def layer_of_opt(directory: Path) -> Path:
    """Have writes below /opt go to *directory*, before the cluster is up; return the layer."""
    upper, work = directory / "opt/upper", directory / "opt/work"
    upper.mkdir(parents=True)
    work.mkdir()
    options = f"lowerdir={OPT},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "layer", OPT], check=True)
    return upper


def forget_faults() -> None:
    """Remove what happens at a time, which begins again whenever the driver's file is written."""
    configuration = Path(os.environ["SIMHOST_CONF"])
    lines = configuration.read_text().splitlines(keepends=True)
    new = configuration.with_suffix(".new")
    new.write_text("".join(line for line in lines if not line.startswith("at ")))
    new.rename(configuration)


class Node:
    """The node of *cluster*: its files, and the manifests as they must be on this host.

    *layer* has what this host writes below /opt.
    """

    def __init__(self, cluster: Cluster, layer: Path) -> None:
        self.cluster = cluster
        self.config = cluster.state / "ctrd/config.toml"
        # A second version: the bundle of the image, and one file more.
        self.newer = cluster.state / "newer"
        self.layer = layer

    def files(self) -> dict[str, str]:
        """Return the digest of each file that an installation could change, by path."""
        places = (
            Path("/etc"),
            # /run/cdi and the kubelet's directory of the cluster.
            *(self.cluster.state / name for name in ("cdi", "kubelet/device-plugins")),
            self.layer,
            STATE,
            *self.config.parent.glob("c*"),
        )
        digests = {}
        for place in places:
            for path in (place, *place.rglob("*")):
                if path.name not in OF_KUBELET:
                    digests[str(path)] = self._digest(path)
        return digests

    def _digest(self, path: Path) -> str:
        if path.is_symlink():
            return f"link {os.readlink(path)}"
        if path.is_file():
            return f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        return f"{path.lstat().st_mode:o}"

    def objects(self, folder: str, *, bundle: Path | None = None) -> str:
        """Return the objects of *folder* as they must be for this node, as YAML."""
        text = self.cluster.run("kubectl", "kustomize", str(DEPLOY / folder))
        documents = list(yaml.safe_load_all(text))
        for document in documents:
            if document["kind"] == "DaemonSet":
                self._adapt(document["spec"]["template"]["spec"], bundle)
        return yaml.safe_dump_all(documents)

    def _adapt(self, spec: dict[str, Any], bundle: Path | None) -> None:
        """Have a pod read what the simulated driver answers, and the engine's config here."""
        variables: dict[str, str] = {}
        # Beside the library that the runtime mounts: services pass no environment on to it.
        answers = os.environ["SIMHOST_CONF"]
        mounts = {"driver": (Path(answers), answers)}
        if spec["serviceAccountName"].endswith("installer"):
            variables = {"RUNTIME_RESTART_MODE": "none"}
            variables |= {"RUNTIME": "containerd", "RUNTIME_CONFIG": str(self.config)}
            mounts = {}
        if bundle is not None:
            variables["GPU_NODE_BUNDLE"] = "/bundle"
            mounts["bundle"] = (bundle, "/bundle")
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            others = [item for item in container["env"] if item["name"] not in variables]
            ours = [{"name": name, "value": value} for name, value in variables.items()]
            if container["command"][1] == "uninstall":
                ours = [item for item in ours if item["name"] == "RUNTIME_RESTART_MODE"]
            container["env"] = [*others, *ours]
            container["volumeMounts"] += [
                {"name": name, "mountPath": path, "readOnly": True}
                for name, (_, path) in mounts.items()
            ]
        spec["volumes"] += [
            {"name": name, "hostPath": {"path": str(path)}} for name, (path, _) in mounts.items()
        ]

    def apply(self, folder: str, *names: str, bundle: Path | None = None) -> None:
        """Apply *folder*, and wait until the DaemonSets *names* are rolled out."""
        text = self.objects(folder, bundle=bundle)
        self.cluster.run("kubectl", "apply", "-f", "-", text=text)
        for name in names:
            self.rolled_out(name)

    def rolled_out(self, name: str) -> None:
        """Return when all pods of the DaemonSet *name* are ready; raise ClusterError."""
        command = ("rollout", "status", f"daemonset/{name}", "-n", SPACE, "--timeout=60s")
        try:
            self.cluster.run("kubectl", *command)
        except ClusterError as error:
            selector = ("-n", SPACE, "-l", f"app.kubernetes.io/name={name}")
            texts = [str(error), self.cluster.run("kubectl", "describe", "pod", *selector)]
            with contextlib.suppress(ClusterError):
                texts.append(
                    self.cluster.run("kubectl", "logs", *selector, "--all-containers=true")
                )
            raise ClusterError("\n".join(texts)) from error

    def remove(self, folder: str) -> None:
        """Delete the objects of *folder*, and wait until they are gone."""
        self.cluster.run("kubectl", "delete", "-k", str(DEPLOY / folder), "--timeout=120s")

    def log_of(self, name: str, container: str) -> str:
        """Return the log of the *container* in the pod of the DaemonSet *name*."""
        words = ("logs", "-n", SPACE, f"daemonset/{name}", "-c", container)
        return self.cluster.run("kubectl", *words)

    def metrics(self) -> str:
        """Return what the exporter serves at the address of its pod."""
        selector = ("-n", SPACE, "-l", "app.kubernetes.io/name=exporter")
        form = "jsonpath={.items[0].status.podIP}"
        address = self.cluster.run("kubectl", "get", "pod", *selector, "-o", form)
        busybox = str(self.cluster.state / "busybox")
        return self.cluster.beside(busybox, "wget", "-qO-", f"http://{address}:9400/metrics")

    def started(self, name: str) -> list[str]:
        """Start a pod of the class with one GPU, which stays; return its device nodes of GPUs."""
        document = pod(name, "ls /dev/nvidia[0-9]*; exec sleep 1000", {RESOURCE: 1})
        document["spec"]["runtimeClassName"] = "gpuruntime"
        self.cluster.apply(document)
        until(lambda: self.cluster.phase(name) == "Running", f"pod {name} runs")
        until(lambda: "nvidia" in self.cluster.logs(name), f"pod {name} writes")
        return self.cluster.logs(name).split()


def life(cluster: Cluster, layer: Path, archive: str) -> dict[str, Any]:
    """Take the node from nothing to pods with GPUs, to a second version, and to nothing again."""
    forget_faults()
    node = Node(cluster, layer)
    results: dict[str, Any] = {}
    cluster.run("import", archive)
    cluster.run("kubectl", "label", "node", NODE, "nvidia.com/gpu.present=true")
    before = node.files()
    node.apply("overlays/install", "installer")
    results["installed"] = node.log_of("installer", "install")
    cluster.run("restart-containerd")
    # Has the other pods tried again at once, which have waited for the runtime.
    cluster.run("restart-kubelet")
    for name in ("device-plugin", "feature-discovery", "exporter"):
        node.rolled_out(name)
    cluster.until_amounts(RESOURCE, GPUS, GPUS)
    results["first"] = node.started("first")
    until(lambda: 'pod="first"' in node.metrics(), "the metrics name the pod")
    results["metrics"] = node.metrics()
    results["node labels"] = cluster.get("node", NODE)["metadata"]["labels"]
    results["restarts"] = restarts(node)
    results["upgrade"] = upgrade(node)
    cluster.delete("pod", "first", "third")
    results["rest"] = rest(node, before)
    return results


def restarts(node: Node) -> dict[str, Any]:
    """Restart the engine and the kubelet below a pod with a GPU, and start another pod."""
    node.cluster.run("restart-containerd")
    node.cluster.run("restart-kubelet")
    node.cluster.until_amounts(RESOURCE, GPUS, GPUS)
    return {"second": node.started("second"), "first": node.cluster.phase("first")}


def upgrade(node: Node) -> dict[str, Any]:
    """Install a second version below pods with GPUs, and start another pod."""
    bundle = images.TREE / "usr/share/gpu-node/bundle"
    shutil.copytree(bundle, node.newer, symlinks=True)
    (node.newer / "share/doc/gpuruntime/newer").write_text("")
    link = Path("/opt/gpuruntime/current")
    before = os.readlink(link)
    node.apply("overlays/install", "installer", bundle=node.newer)
    results = {"before": before, "after": os.readlink(link)}
    node.cluster.delete("pod", "second")
    return {**results, "third": node.started("third"), "first": node.cluster.phase("first")}


def rest(node: Node, before: dict[str, str]) -> dict[str, Any]:
    """Remove everything; return the files that are not as they were *before*, and the log."""
    node.remove("overlays/install")
    node.apply("overlays/uninstall", "uninstaller")
    log = node.log_of("uninstaller", "uninstall")
    node.cluster.run("restart-containerd")
    node.remove("overlays/uninstall")
    after = node.files()
    names = sorted({*before, *after})
    return {"log": log, "files": [name for name in names if before.get(name) != after.get(name)]}
