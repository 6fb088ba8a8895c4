# SPDX-License-Identifier: Apache-2.0
"""The manifests of `deploy/`: what `kubectl kustomize` makes of them, and what they allow."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import gpuruntime
from gpunode.cli import agent_services
from gpunode.cli.main import root
from gpunode.config import file as config_file

TREE = Path(__file__).resolve().parents[3]
DEPLOY = TREE / "deploy"
FOLDERS = sorted(
    str(path.parent.relative_to(DEPLOY)) for path in DEPLOY.rglob("kustomization.yaml")
)
# What an operator applies.
WHOLE = ["base", *(name for name in FOLDERS if name.startswith("overlays/"))]
NAMESPACE = "gpu-node"
IMAGE = f"localhost/gpu-node:{gpuruntime.__version__}"
# Overlay → account → what it may do: "verb resource", with the namespace unless it is the cluster.
NOTHING: dict[str, set[str]] = {"device-plugin": set(), "exporter": set()}
LABELS = {"feature-discovery": {"patch nodes"}}
RIGHTS: dict[str, dict[str, set[str]]] = {
    "base": {**NOTHING, **LABELS},
    "overlays/device-plugin": {"device-plugin": set()},
    "overlays/labels-and-metrics": {"exporter": set(), **LABELS},
    "overlays/monitoring": {**NOTHING, **LABELS},
    "overlays/mig": {
        **NOTHING,
        **LABELS,
        "mig-manager": {
            *(f"{verb} nodes" for verb in ("get", "list", "watch", "patch")),
            "create events in default",
            f"list pods in {NAMESPACE}",
        },
    },
    "overlays/mps": {**NOTHING, **LABELS, "mps-daemon": set()},
    "overlays/node-feature": {
        **NOTHING,
        "feature-discovery": {
            f"{verb} nodefeatures.nfd.k8s-sigs.io in {NAMESPACE}" for verb in ("create", "patch")
        },
    },
    "overlays/time-slicing": {**NOTHING, **LABELS},
    "overlays/agent": LABELS,
    "overlays/install": {**NOTHING, **LABELS, "installer": set()},
    "overlays/uninstall": {"uninstaller": set()},
}
# What changes files of the host: its pods exist before the runtime does, or after it.
INSTALLERS = {"installer", "uninstaller"}
OF_INSTALLER = {"root", "host /", "CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SYS_CHROOT"}
# Service → what its container has beyond the level "restricted" of PodSecurity.
EXTRAS = {
    "device-plugin": {
        "root",
        "host /",
        "host /var/lib/kubelet/device-plugins",
        "host /var/run/cdi",
    },
    "exporter": {"root", "KILL", "SETGID", "SETUID", "host /var/lib/kubelet/pod-resources"},
    "feature-discovery": set(),
    "agent": {
        *("root", "KILL", "SETGID", "SETUID", "host /", "host /var/run/cdi"),
        *(f"host /var/lib/kubelet/{name}" for name in ("device-plugins", "pod-resources")),
    },
    "mig-manager": {
        *("root", "host /", "CHOWN", "DAC_OVERRIDE", "FOWNER", "MKNOD", "SYS_ADMIN", "SYS_CHROOT"),
    },
    "mps-daemon": {
        *("root", "SYS_ADMIN", "hostPID"),
        *("host /dev/shm/nvidia-mps", "host /dev/shm/nvidia-mps/shm"),
    },
    **dict.fromkeys(INSTALLERS, OF_INSTALLER),
}
EXTRAS_OF_OVERLAYS = {("overlays/mps", "device-plugin"): {"host /dev/shm/nvidia-mps"}}
WRITABLE = {"/var/lib/kubelet/device-plugins", "/var/run/cdi", "/tmp"}
# Keys of the config file that the manifests set otherwise, or that belong to one overlay.
ELSEWHERE = {
    "flags.mpsRoot",  # overlays/mps
    "flags.nvidiaDevRoot",
    "flags.useNodeFeatureAPI",  # overlays/node-feature
    "flags.plugin.cdiAnnotationPrefix",
    "flags.plugin.containerDriverRoot",
    "flags.plugin.nvidiaCTKPath",
    "flags.gfd.oneshot",
    "flags.gfd.outputFile",
    "flags.gfd.machineTypeFile",
}

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="not installed: kubectl"
)
Object = dict[str, Any]


@functools.cache
def rendered(folder: str) -> tuple[Object, ...]:
    """Return the objects that kubectl makes of *folder*, without a network."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / folder)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(folder: str, *kinds: str) -> list[Object]:
    """Return the objects of *kinds* in *folder*."""
    return [document for document in rendered(folder) if document["kind"] in kinds]


def pods(folder: str) -> Iterator[tuple[str, Object]]:
    """Yield the name and the pod spec of each DaemonSet of *folder*."""
    for document in of_kind(folder, "DaemonSet"):
        yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def containers(spec: Object) -> list[Object]:
    """Return the containers of a pod, with those that run before."""
    return [*spec.get("initContainers", ()), *spec["containers"]]


def rights(folder: str) -> dict[str, set[str]]:
    """Return what each account of *folder* may do."""
    roles = {
        (document["kind"], document["metadata"]["name"]): document["rules"]
        for document in of_kind(folder, "Role", "ClusterRole")
    }
    accounts: dict[str, set[str]] = {
        document["metadata"]["name"]: set() for document in of_kind(folder, "ServiceAccount")
    }
    for binding in of_kind(folder, "RoleBinding", "ClusterRoleBinding"):
        reference = binding["roleRef"]
        space = binding["metadata"].get("namespace")
        for rule in roles[reference["kind"], reference["name"]]:
            allowed = {
                f"{verb} {resource}{'.' * bool(group)}{group}{f' in {space}' if space else ''}"
                for verb in rule["verbs"]
                for group in rule["apiGroups"]
                for resource in rule["resources"]
            }
            for subject in binding["subjects"]:
                assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", NAMESPACE)
                accounts[subject["name"]] |= allowed
    return accounts


def extras(spec: Object) -> set[str]:
    """Return what the containers of a pod have beyond the level "restricted" of PodSecurity."""
    result = set()
    for container in containers(spec):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["capabilities"]["drop"] == ["ALL"]
        result |= {*security["capabilities"].get("add", ()), *({"privileged"} & security.keys())}
        if not security.get("runAsNonRoot"):
            result.add("root")
    result |= {
        f"host {volume['hostPath']['path']}" for volume in spec["volumes"] if "hostPath" in volume
    }
    shared = {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    return result | shared


@needs_kubectl
@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_is_complete(folder: str) -> None:
    """Each object has its names, no two are the same, and objects refer to those that exist."""
    documents = rendered(folder)
    assert documents
    for document in documents:
        assert {"apiVersion", "kind", "metadata"} <= document.keys()
    identities = [
        (document["kind"], document["metadata"].get("namespace"), document["metadata"]["name"])
        for document in documents
    ]
    assert len(set(identities)) == len(identities)


@needs_kubectl
@pytest.mark.parametrize("folder", WHOLE)
def test_what_pods_refer_to_exists(folder: str) -> None:
    """The account, the class, the config, the selector, and the name of each probe's port."""
    names = {(document["kind"], document["metadata"]["name"]) for document in rendered(folder)}
    for document in of_kind(folder, "DaemonSet"):
        template = document["spec"]["template"]
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in names
        is_installer = document["metadata"]["name"] in INSTALLERS
        assert is_installer == ("runtimeClassName" not in spec)
        assert is_installer or ("RuntimeClass", spec["runtimeClassName"]) in names
        assert template["metadata"]["labels"].items() >= (
            document["spec"]["selector"]["matchLabels"].items()
        )
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
        for container in containers(spec):
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in () if is_installer else ("livenessProbe", "readinessProbe"):
                assert container[probe]["httpGet"]["port"] in ports
        assert document["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": "10%"}


@needs_kubectl
@pytest.mark.parametrize("folder", WHOLE)
def test_the_rights_of_each_account(folder: str) -> None:
    """All of them; a right that is added must be added to the table."""
    assert rights(folder) == RIGHTS[folder]


@needs_kubectl
@pytest.mark.parametrize("folder", WHOLE)
def test_only_accounts_with_rights_have_a_token(folder: str) -> None:
    """A token is a projected volume of the container that needs it."""
    accounts = rights(folder)
    for account in of_kind(folder, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for _, spec in pods(folder):
        assert spec["automountServiceAccountToken"] is False
        has_token = any("projected" in volume for volume in spec["volumes"])
        assert has_token == bool(accounts[spec["serviceAccountName"]])


@needs_kubectl
@pytest.mark.parametrize("folder", WHOLE)
def test_what_pods_have_beyond_the_restricted_level(folder: str) -> None:
    """No pod is privileged, and one shares a namespace of the host."""
    for name, spec in pods(folder):
        assert extras(spec) == EXTRAS[name] | EXTRAS_OF_OVERLAYS.get((folder, name), set())


@needs_kubectl
def test_pods_write_only_where_they_must() -> None:
    """The root file system and all other mounts are read-only."""
    for _, spec in pods("base"):
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        writable = {
            mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
        }
        assert writable <= WRITABLE


@needs_kubectl
@pytest.mark.parametrize("folder", WHOLE)
def test_every_image_is_ours_in_this_version(folder: str) -> None:
    """An overlay replaces name and tag by `images:`, which needs one name."""
    images = {container["image"] for _, spec in pods(folder) for container in containers(spec)}
    assert images == {IMAGE}


@needs_kubectl
@pytest.mark.parametrize("folder", WHOLE)
def test_every_command_is_one_of_gpu_node(folder: str) -> None:
    """With options that the command has."""
    commands = [container["command"] for _, spec in pods(folder) for container in containers(spec)]
    for program, command, *options in commands:
        assert program == "gpu-node"
        usage = CliRunner().invoke(root, [command, "--help"]).output
        for option in options:
            assert re.search(rf"(?m)^  (-\w, )?{option.partition('=')[0]}\b", usage), option


@needs_kubectl
@pytest.mark.parametrize("folder", WHOLE)
def test_the_config_can_be_used(folder: str, tmp_path: Path) -> None:
    """The reader of the device plugin accepts it."""
    configs = {document["metadata"]["name"]: document for document in of_kind(folder, "ConfigMap")}
    path = tmp_path / "config.yaml"
    path.write_text(configs["gpu-node"]["data"]["config.yaml"])
    shared = config_file.read(str(path)).get(("sharing",))
    is_shared = folder in ("overlays/mps", "overlays/time-slicing")
    assert bool(shared) == is_shared


@needs_kubectl
def test_the_config_of_the_agent_can_be_used(tmp_path: Path) -> None:
    """It has the services that the DaemonSets of one service have, and their ports."""
    configs = {item["metadata"]["name"]: item for item in of_kind("overlays/agent", "ConfigMap")}
    path = tmp_path / "agent.yaml"
    path.write_text(configs["gpu-node-agent"]["data"]["agent.yaml"])
    file = agent_services.read(str(path))
    assert set(file.get(("services",))) == {name for name, _ in pods("base")}
    ((_, spec),) = pods("overlays/agent")
    ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
    assert file.get(("healthz",)) == f":{ports['health']}"
    assert file.get(("services", "exporter", "listen")) == f":{ports['metrics']}"


@needs_kubectl
def test_the_child_of_the_agent_may_read_the_token() -> None:
    """The kubelet lets the pod's group read it, which is that of nobody in the image."""
    ((_, spec),) = pods("overlays/agent")
    nobody = re.search(r"nobody:x:\d+:(\d+):", (TREE / "scripts/image_root.py").read_text())
    assert nobody is not None
    assert spec["securityContext"]["fsGroup"] == int(nobody[1])


def keys(schema: Object, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted paths of the values below flags and imex in the *schema* of the config."""
    for name, value in schema["properties"].items():
        if "properties" in value:
            yield from keys(value, (*path, name))
        elif path and path[0] in ("flags", "imex"):
            yield ".".join((*path, name))


def test_every_value_of_the_config_is_explained() -> None:
    """In a comment above it; values that the manifests set otherwise are in the table."""
    schema = json.loads((TREE / "gpunode/config/schema.json").read_text())
    (document,) = yaml.safe_load_all((DEPLOY / "base/common/config.yaml").read_text())
    text = document["data"]["config.yaml"]
    config = yaml.safe_load(text)
    for key in set(keys(schema)) - ELSEWHERE:
        value: Any = config
        for name in key.split("."):
            assert name in value, key
            value = value[name]
    # gdsEnabled and mofedEnabled share the comment of the line before.
    silent = {"gdsEnabled", "mofedEnabled"}
    lines = text.splitlines()
    for before, line in itertools.pairwise(lines):
        matched = re.fullmatch(r" +(\w+): .+", line)
        if matched and matched[1] not in silent:
            assert before.strip().startswith("#"), line
