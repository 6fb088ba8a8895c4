# SPDX-License-Identifier: Apache-2.0
"""The part of `scenario.py` that takes the node from nothing to pods with GPUs, and back.

It needs the archive of `make image`, which the pods of `deploy/` are made from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import images
import yaml
from cluster import NODE, Cluster, ClusterError, pod, until

from deploy import DEPLOY, SPACE

RESOURCE = "nvidia.com/gpu"
GPUS = 4
SERVICES = ("device-plugin", "feature-discovery", "exporter")
MIG_RESOURCE = "nvidia.com/mig-1g.10gb"
MIG_DEVICES = 7 * GPUS
CONFIG = "nvidia.com/mig.config"
COUNT = f"{RESOURCE}.count"
LOOK = "ls -d /dev/nvidia[0-9]* /dev/nvidia-caps/* 2>&-"
CLIENTS = 4
LOOK_FOR_MPS = "env | grep CUDA_MPS; touch /dev/shm/of-client; ls -d /mps/*/*/pipe/control"
LOW_LEVEL = Path(__file__).parent / "low_level"
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


def share_kernel(directory: Path) -> None:
    """Have *directory* show what the kernel says in /proc, and all containers /proc/driver.

    The cluster has a procfs and a /run of its own.
    """
    (directory / "proc-driver").mkdir()
    (directory / "proc-devices").touch()
    for name in ("driver", "devices"):
        subprocess.run(
            ["mount", "--bind", f"/proc/{name}", directory / f"proc-{name}"], check=True
        )
    runc = shutil.which("runc") or ""
    shutil.copy2(runc, directory / "runc")
    subprocess.run(["mount", "--bind", LOW_LEVEL / "runc", runc], check=True)
    program = str(LOW_LEVEL / "show_driver.py")
    os.environ.update(KERNEL=str(directory), PYTHON=sys.executable, SHOW_DRIVER=program)


def show_kernel(cluster: Cluster) -> None:
    """Have the procfs of the cluster show the same, as any procfs does with a real driver."""
    for name in ("driver", "devices"):
        source = f"{os.environ['KERNEL']}/proc-{name}"
        cluster.beside("mount", "--bind", source, f"/proc/{name}")


def share_answers(directory: Path) -> None:
    """Have NVML answer from a file in *directory*, which pods can mount: changes rename it.

    What happens at a time is removed: it would happen again whenever the file is written.
    """
    directory.mkdir()
    file = Path(os.environ["SIMHOST_CONF"])
    lines = file.read_text().splitlines(keepends=True)
    moved = directory / file.name
    moved.write_text("".join(line for line in lines if not line.startswith("at ")))
    new = file.with_suffix(".new")
    new.write_text(f"elsewhere {moved}\n")
    new.rename(file)


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
        self.answers = cluster.state / "answers"

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
        pointer = os.environ["SIMHOST_CONF"]
        mounts = {"driver": (Path(pointer), pointer), "answers": (self.answers, str(self.answers))}
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
                {"name": name, "mountPath": path, "readOnly": name != "answers"}
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

    def restart(self) -> None:
        """Have all pods read a changed config, as the documents say."""
        self.cluster.run("kubectl", "-n", SPACE, "rollout", "restart", "daemonset")
        for name in SERVICES:
            self.rolled_out(name)

    def rolled_out(self, name: str) -> None:
        """Return when all pods of the DaemonSet *name* are ready; raise ClusterError."""
        command = ("rollout", "status", f"daemonset/{name}", "-n", SPACE, "--timeout=60s")
        self.cluster.run("kubectl", *command)

    def logs(self) -> str:
        """Return the ends of the logs of all our pods, and what the API server says of these."""
        ours = ("-n", SPACE, "-l", "app.kubernetes.io/part-of=gpu-node")
        words = ("logs", *ours, "--all-containers", "--prefix", "--tail=30")
        return "\n".join(
            self.cluster.run("kubectl", *command)
            for command in (words, ("describe", "pod", *ours))
        )

    def configure(self, config: str) -> None:
        """Have the manager of MIG apply *config*; raise ClusterError if it does not."""
        self.cluster.run("kubectl", "label", "node", NODE, "--overwrite", f"{CONFIG}={config}")
        message = f"the GPUs have the MIG config {config}"
        until(lambda: message in self.log_of("mig-manager", "mig-manager"), message)

    def remove(self, folder: str) -> None:
        """Delete the objects of *folder*, and wait until they are gone."""
        self.cluster.run("kubectl", "delete", "-k", str(DEPLOY / folder), "--timeout=120s")

    def log_of(self, name: str, container: str) -> str:
        """Return the log of the *container* in the pod of the DaemonSet *name*."""
        words = ("logs", "-n", SPACE, f"daemonset/{name}", "-c", container)
        return self.cluster.run("kubectl", *words)

    def metrics(self, name: str = "exporter") -> str:
        """Return the metrics that the DaemonSet *name* serves at the address of its pod."""
        selector = ("-n", SPACE, "-l", f"app.kubernetes.io/name={name}")
        form = "jsonpath={.items[0].status.podIP}"
        address = self.cluster.run("kubectl", "get", "pod", *selector, "-o", form)
        busybox = str(self.cluster.state / "busybox")
        return self.cluster.beside(busybox, "wget", "-qO-", f"http://{address}:9400/metrics")

    def started(self, name: str, resource: str = RESOURCE, command: str = LOOK) -> list[str]:
        """Start a pod of the class with one *resource*, which stays; return what it prints."""
        document = pod(name, f"{command}; exec sleep 1000", {resource: 1})
        document["spec"]["runtimeClassName"] = "gpuruntime"
        self.cluster.apply(document)
        until(lambda: self.cluster.phase(name) == "Running", f"pod {name} runs")
        until(lambda: "nvidia" in self.cluster.logs(name), f"pod {name} writes")
        return self.cluster.logs(name).split()


def life(cluster: Cluster, layer: Path, archive: str) -> dict[str, Any]:
    """Take the node from nothing to pods with GPUs, to a second version, and to nothing again."""
    node = Node(cluster, layer)
    show_kernel(cluster)
    share_answers(node.answers)
    cluster.run("import", archive)
    cluster.run("kubectl", "label", "node", NODE, "nvidia.com/gpu.present=true")
    results: dict[str, Any] = {}
    before = node.files()
    try:
        results["installation"] = installation(node)
        for play in (restarts, upgrade, partitioned, agent, mps):
            results[play.__name__] = play(node)
        results["rest"] = rest(node, before)
    except ClusterError as error:
        raise ClusterError(f"{error}\n{node.logs()}") from error
    return results


def installation(node: Node) -> dict[str, Any]:
    """Apply the folder that has everything; return what a pod sees, and what is said of it."""
    node.apply("overlays/install", "installer")
    results: dict[str, Any] = {"log": node.log_of("installer", "install")}
    node.cluster.run("restart-containerd")
    # Has the other pods tried again at once, which have waited for the runtime.
    node.cluster.run("restart-kubelet")
    for name in SERVICES:
        node.rolled_out(name)
    node.cluster.until_amounts(RESOURCE, GPUS, GPUS)
    results["first"] = node.started("first")
    until(lambda: 'pod="first"' in node.metrics(), "the metrics name the pod")
    results["metrics"] = node.metrics()
    results["labels"] = node.cluster.get("node", NODE)["metadata"]["labels"]
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
    results |= {"third": node.started("third"), "first": node.cluster.phase("first")}
    node.cluster.delete("pod", "first", "third")
    return results


def partitioned(node: Node) -> dict[str, Any]:
    """Partition all GPUs by a label, start a pod with a MIG device, and undo it."""
    node.apply("overlays/mig", "mig-manager")
    node.restart()
    node.configure("all-1g.10gb")
    node.cluster.until_amounts(MIG_RESOURCE, MIG_DEVICES, MIG_DEVICES)
    until(lambda: node.cluster.amounts(RESOURCE)[1] == 0, "no GPU is offered as a whole")
    results: dict[str, Any] = {"small": node.started("small", MIG_RESOURCE)}
    until(lambda: 'pod="small"' in node.metrics(), "the metrics name the pod")
    results["metrics"] = node.metrics()
    results["labels"] = node.cluster.get("node", NODE)["metadata"]["labels"]
    node.cluster.delete("pod", "small")
    node.configure("all-disabled")
    node.cluster.until_amounts(RESOURCE, GPUS, GPUS)
    node.remove("base/mig-manager")
    node.remove("overlays/install")
    return results


def agent(node: Node) -> dict[str, Any]:
    """Run all services as one DaemonSet, on a node whose runtime stays installed."""
    node.cluster.run("kubectl", "label", "node", NODE, f"{COUNT}-")
    node.apply("overlays/agent", "agent")
    node.cluster.until_amounts(RESOURCE, GPUS, GPUS)
    results: dict[str, Any] = {"pod": node.started("fourth")}
    until(lambda: 'pod="fourth"' in node.metrics("agent"), "the metrics name the pod")
    results["labels"] = node.cluster.get("node", NODE)["metadata"]["labels"]
    node.cluster.delete("pod", "fourth")
    node.remove("overlays/agent")
    return results


def mps(node: Node) -> dict[str, Any]:
    """Share the GPUs by MPS, whose daemon is in a pod; return what a client sees and leaves."""
    node.apply("overlays/mps", "mps-daemon")
    node.cluster.until_amounts(RESOURCE, GPUS * CLIENTS, GPUS * CLIENTS)
    results = {"client": node.started("client", command=LOOK_FOR_MPS)}
    words = ("exec", "-n", SPACE, "daemonset/mps-daemon", "--")
    memory = "import os; print(*os.listdir('/dev/shm'))"
    results["memory"] = node.cluster.run("kubectl", *words, "python3", "-c", memory).split()
    node.cluster.delete("pod", "client")
    node.remove("overlays/mps")
    return results


def rest(node: Node, before: dict[str, str]) -> dict[str, Any]:
    """Remove everything; return the files that are not as they were *before*, and the log."""
    node.apply("overlays/uninstall", "uninstaller")
    log = node.log_of("uninstaller", "uninstall")
    node.cluster.run("restart-containerd")
    node.remove("overlays/uninstall")
    after = node.files()
    names = sorted({*before, *after})
    return {"log": log, "files": [name for name in names if before.get(name) != after.get(name)]}
