# SPDX-License-Identifier: Apache-2.0
"""A real one-node Kubernetes on the simulated host, by the script `k8s-up.sh`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPT = "k8s-up.sh"
ARCHIVE = "kubeall.xz"
# What the script calls besides the programs of Kubernetes.
PROGRAMS = ("etcd", "containerd", "ctr", "runc", "kubectl", "openssl", "socat", "xz")
NODE = "one"
IMAGE = "localhost/busybox:1"
DEADLINE_S = 60.0


class ClusterError(Exception):
    """A command of the cluster failed, or nothing came in time."""


def script() -> Path | None:
    """Return the script of the directory KUBERNETES, or that on PATH; None without both."""
    directory = os.environ.get("KUBERNETES")
    if directory:
        path = Path(directory, SCRIPT).resolve()
        return path if path.is_file() else None
    found = shutil.which(SCRIPT)
    return Path(found).resolve() if found else None


class Cluster:
    """The cluster with its files in *state*, a directory with a short path."""

    def __init__(self, state: Path, oci_runtime: Path) -> None:
        path = script()
        assert path is not None
        self.script = path
        self.state = state
        self.environment = {
            **os.environ,
            "STATE": str(state),
            "OCI_RUNTIME": str(oci_runtime),
            "NICE": "0",
        }
        kubelet = shutil.which("kubelet")
        if kubelet and not (path.parent / ARCHIVE).exists():
            self.environment["KBIN"] = str(Path(kubelet).parent)

    def run(self, *words: str, text: str | None = None) -> str:
        """Return what the script prints for *words*; raise ClusterError."""
        done = subprocess.run(
            [str(self.script), *words],
            env=self.environment,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Have the cluster within the context."""
        self.run("up")
        try:
            yield
        finally:
            self.run("down")

    @contextlib.contextmanager
    def process(self, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run *words* beside the kubelet within the context; end the process by SIGTERM."""
        holder = (self.state / "holder.pid").read_text().strip()
        with log.open("ab") as stream:
            process = subprocess.Popen(
                ["nsenter", "-t", holder, "-m", "-n", "-p", "--", *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            # nsenter passes no signal on: the group has the program as well.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def beside(self, *words: str) -> str:
        """Return what *words* print, run beside the kubelet; raise ClusterError."""
        holder = (self.state / "holder.pid").read_text().strip()
        done = subprocess.run(
            ["nsenter", "-t", holder, "-m", "-n", "-p", "--", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(words)}: {done.stderr.strip()} {done.stdout.strip()}")
        return done.stdout

    @property
    def kubeconfig(self) -> str:
        """The file with the rights of the administrator."""
        return str(self.state / "admin.kubeconfig")

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object of the API server."""
        document: dict[str, Any] = json.loads(
            self.run("kubectl", "get", kind, name, "-o", "json", "--request-timeout=10s")
        )
        return document

    def apply(self, document: Mapping[str, Any]) -> None:
        """Create the object *document*."""
        self.run("kubectl", "apply", "-f", "-", text=json.dumps(document))

    def delete(self, kind: str, *names: str) -> None:
        """Remove objects at once, and wait until they are gone."""
        self.run("kubectl", "delete", kind, *names, "--grace-period=1", "--timeout=60s")

    def amounts(self, resource: str) -> tuple[int, int]:
        """Return the node's capacity and allocatable units of *resource*."""
        status = self.get("node", NODE)["status"]
        return (
            int(status["capacity"].get(resource, 0)),
            int(status["allocatable"].get(resource, 0)),
        )

    def until_amounts(self, resource: str, capacity: int, allocatable: int) -> float:
        """Return the seconds until the node has these amounts."""
        begin = time.monotonic()
        wanted = (capacity, allocatable)
        until(lambda: self.amounts(resource) == wanted, f"{resource} {wanted}")
        return time.monotonic() - begin

    def phase(self, name: str) -> str:
        """Return the phase of a pod."""
        phase: str = self.get("pod", name)["status"].get("phase", "")
        return phase

    def logs(self, name: str) -> str:
        """Return the output of the container of a pod."""
        return self.run("kubectl", "logs", name)


def pod(name: str, command: str, limits: Mapping[str, int]) -> dict[str, Any]:
    """Return a pod whose one container executes *command* and gets *limits*."""
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", command],
        "resources": {"limits": {key: str(number) for key, number in limits.items()}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [container],
        },
    }


def daemon_set(name: str, command: Sequence[str]) -> dict[str, Any]:
    """Return a DaemonSet of *command* as the programs of the host, from a pod of its own.

    The program, its interpreter and the driver are those of the host, at their paths.
    """
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/chroot", "/host", *command],
        "securityContext": {"privileged": True},
        "volumeMounts": [
            {"name": "host", "mountPath": "/host", "mountPropagation": "HostToContainer"}
        ],
    }
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "terminationGracePeriodSeconds": 5,
                    "containers": [container],
                    "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
                },
            },
        },
    }


def until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
    """Return when *condition* is true; raise ClusterError after *seconds*."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"not in time: {what}")
        # Each look starts a kubectl, which costs as much as the cluster does in half a second.
        time.sleep(0.7)


def fail(error: ClusterError, logs: Sequence[Path]) -> None:
    """End the program with *error* and the last lines of *logs*."""
    tails = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs if path.exists()]
    sys.exit("\n".join([f"cluster: {error}", *tails]))
