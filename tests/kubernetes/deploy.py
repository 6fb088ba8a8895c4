# SPDX-License-Identifier: Apache-2.0
"""The part of `scenario.py` that applies `deploy/`, and tries what its accounts may do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from cluster import NODE, Cluster, ClusterError, pod, until

BIN = Path(sys.prefix, "bin")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FOLDERS = ["base", *sorted(f"overlays/{path.name}" for path in (DEPLOY / "overlays").iterdir())]
SPACE = "gpu-node"
API = "https://127.0.0.1:6443"
# The kinds of what is outside of the namespace.
KINDS = (
    "clusterroles",
    "clusterrolebindings",
    "namespaces",
    "runtimeclasses",
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
)
OTHER = "two"
LABEL = "nvidia.com/gpu.count"
OWN, OTHERS = (f"/api/v1/nodes/{name}" for name in (NODE, OTHER))
IN_SPACE = f"/api/v1/namespaces/{SPACE}"
APPS = f"/apis/apps/v1/namespaces/{SPACE}"
EVENT = {
    "apiVersion": "v1",
    "kind": "Event",
    "metadata": {"name": "test", "namespace": SPACE},
    "involvedObject": {"kind": "Node", "name": NODE, "namespace": SPACE},
}


def labels(**values: str | None) -> dict[str, Any]:
    """Return the patch of a node that sets the labels *values*; None removes one."""
    names = {
        "ours": "nvidia.com/test",
        "theirs": "example.com/a",
        "host": "kubernetes.io/hostname",
    }
    return {"metadata": {"labels": {names[key]: value for key, value in values.items()}}}


# Name → method, path and body. NODE is the node of the account's pod.
ATTEMPTS: dict[str, tuple[str, str, object]] = {
    "label of ours": ("PATCH", OWN, labels(ours="1")),
    "label of another node": ("PATCH", OTHERS, labels(ours="1")),
    "label of others": ("PATCH", OWN, labels(theirs="1")),
    "label removed": ("PATCH", OWN, labels(host=None)),
    "annotation": ("PATCH", OWN, {"metadata": {"annotations": {"nvidia.com/a": "1"}}}),
    "finalizer": ("PATCH", OWN, {"metadata": {"finalizers": ["example.com/a"]}}),
    "unschedulable": ("PATCH", OWN, {"spec": {"unschedulable": True}}),
    "status": ("PATCH", f"{OWN}/status", {"status": {"capacity": {"nvidia.com/gpu": "9"}}}),
    "read the node": ("GET", OWN, None),
    "delete the node": ("DELETE", OWN, None),
    "read pods": ("GET", "/api/v1/pods", None),
    "read secrets": ("GET", f"{IN_SPACE}/secrets", None),
    "read the config": ("GET", f"{IN_SPACE}/configmaps/gpu-node", None),
    "write events": ("POST", f"{IN_SPACE}/events", EVENT),
    "change the service": (
        "DELETE",
        f"/apis/apps/v1/namespaces/{SPACE}/daemonsets/exporter",
        None,
    ),
}


class Account:
    """An account of the namespace, by a token for the pod *pod_name*, or for no pod."""

    def __init__(self, cluster: Cluster, name: str, pod_name: str = "") -> None:
        self.cluster = cluster
        request: dict[str, Any] = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        if pod_name:
            reference = {"kind": "Pod", "apiVersion": "v1", "name": pod_name}
            request["spec"]["boundObjectRef"] = reference
        path = f"/api/v1/namespaces/{SPACE}/serviceaccounts/{name}/token"
        answer = cluster.run(
            "kubectl", "create", "--raw", path, "-f", "-", text=json.dumps(request)
        )
        self.token: str = json.loads(answer)["status"]["token"]
        self.authority = str(cluster.state / "pki/ca.crt")
        self.kubeconfig = cluster.state / f"{name}.json"

    def attempt(self, *names: str) -> dict[str, str]:
        """Return why the API server refuses the attempts *names*, "" for those it does not."""
        words = (sys.executable, str(Path(__file__).with_name("api_requests.py")))
        requests = json.dumps({name: ATTEMPTS[name] for name in names})
        output = self.cluster.run(
            *("exec", *words, API, self.authority, self.token), text=requests
        )
        answers: dict[str, str] = json.loads(output)
        return answers

    def save(self) -> Path:
        """Write the file for clients of the API server, and return its path."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": self.token}}],
            "clusters": [
                {"name": "c", "cluster": {"server": API, "certificate-authority": self.authority}}
            ],
        }
        self.kubeconfig.write_text(json.dumps(config))
        return self.kubeconfig


def of_account(name: str) -> dict[str, Any]:
    """Return a pod of the account *name* on the node."""
    document = pod(name, "exec sleep 1000", {})
    document["metadata"]["namespace"] = SPACE
    document["spec"].update(serviceAccountName=name, nodeName=NODE)
    return document


def apply(cluster: Cluster) -> dict[str, Any]:
    """Return the errors of a server's dry run of each folder; the namespace must exist."""
    cluster.run("kubectl", "create", "namespace", SPACE)
    errors = {}
    for folder in FOLDERS:
        try:
            cluster.run("kubectl", "apply", "--dry-run=server", "-k", str(DEPLOY / folder))
            errors[folder] = ""
        except ClusterError as error:
            errors[folder] = str(error)
    return errors


def rights(cluster: Cluster) -> dict[str, Any]:
    """Return what the API server refuses each account."""
    cluster.run("kubectl", "apply", "-k", str(DEPLOY / "base"))
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER}})
    names = ("device-plugin", "exporter", "feature-discovery")
    for name in names:
        cluster.apply(of_account(name))
    discovery = Account(cluster, "feature-discovery", "feature-discovery")
    # The API server loads a policy some time after it was made.
    until(lambda: all(discovery.attempt("label of others").values()), "the policy is in force")
    results: dict[str, Any] = {
        name: Account(cluster, name, name).attempt(*ATTEMPTS) for name in names
    }
    results["without a pod"] = Account(cluster, "feature-discovery").attempt("label of ours")
    # The administrator has set it before.
    cluster.run("kubectl", "label", "node", NODE, f"{LABEL}-")
    cluster.run("exec", "/usr/bin/env", *discover(discovery))
    results["labels"] = cluster.get("node", NODE)["metadata"]["labels"]
    return results


def discover(account: Account) -> list[str]:
    """Return the command that publishes the labels of the node as *account*."""
    return [
        *(f"{name}={os.environ[name]}" for name in ("SIMHOST_CONF", "PATH")),
        *(str(BIN / "gpu-node"), "feature-discovery", "--node-labels", "--oneshot"),
        *(f"--node-name={NODE}", f"--kubeconfig={account.save()}"),
    ]


def removal(cluster: Cluster) -> list[str]:
    """Return the objects that remain after the folder was deleted."""
    cluster.run("kubectl", "delete", "-k", str(DEPLOY / "base"), "--timeout=120s")
    kinds = (
        "clusterroles,clusterrolebindings,runtimeclasses,validatingadmissionpolicies,namespaces"
    )
    names = cluster.run("kubectl", "get", kinds, "-o", "name").split()
    return [name for name in names if "gpu" in name]
