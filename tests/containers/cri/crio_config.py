# SPDX-License-Identifier: Apache-2.0
"""A config.json as CRI-O writes it for a container of a pod, with cgroupfs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = "io.kubernetes.cri-o"
POD = "4d3c2b1a-0000-4000-8000-0123456789ab"
CAPABILITIES = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_SETGID", "CAP_SETUID"),
    *("CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_KILL"),
)
MASKED = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware")
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
# Files that CRI-O or the kubelet creates for a container or its pod → path in the container.
FILES = {
    "resolv.conf": "/etc/resolv.conf",
    "hostname": "/etc/hostname",
    "etc-hosts": "/etc/hosts",
    "containerenv": "/run/.containerenv",
    "termination": "/dev/termination-log",
}


def container(
    name: str,
    root: Path,
    bundle: Path,
    *,
    args: Sequence[str],
    env: Sequence[str],
    capability: str,
    namespaces: Mapping[str, Path],
) -> dict[str, Any]:
    """Return the config of the container *name*; create the files that it mounts in *bundle*.

    *capability* is added by the pod; *namespaces* are those of its sandbox.
    """
    for file in FILES:
        (bundle / file).write_text("")
    (bundle / "shm").mkdir()
    capabilities = [*CAPABILITIES, capability]
    return {
        "ociVersion": "1.0.2-dev",
        "process": {
            "user": {"uid": 0, "gid": 0, "additionalGids": [0]},
            "args": list(args),
            "env": [*env, "TERM=xterm", "HOSTNAME=look"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": str(root)},
        "hostname": "look",
        "mounts": _mounts(bundle),
        "annotations": _annotations(name, root),
        "linux": {
            "resources": {
                "devices": _rules(),
                "memory": {},
                "cpu": {"shares": 2, "period": 100000},
                "pids": {"limit": 1024},
            },
            "cgroupsPath": f"/kubepods/besteffort/pod{POD}/crio-{name}",
            "namespaces": [
                {"type": "pid"},
                *(
                    {"type": "network" if kind == "net" else kind, "path": str(path)}
                    for kind, path in namespaces.items()
                ),
                {"type": "mount"},
            ],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
        },
    }


def _mounts(bundle: Path) -> list[dict[str, Any]]:
    flags = ["nosuid", "noexec", "nodev"]

    def mount(target: str, kind: str, source: object, *options: str) -> dict[str, Any]:
        return {
            "destination": target,
            "type": kind,
            "source": str(source),
            "options": list(options),
        }

    return [
        mount("/proc", "proc", "proc", *flags),
        mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        mount(
            *("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance"),
            *("ptmxmode=0666", "mode=0620", "gid=5"),
        ),
        mount("/dev/mqueue", "mqueue", "mqueue", *flags),
        mount("/sys", "sysfs", "sysfs", *flags, "ro"),
        mount("/sys/fs/cgroup", "cgroup", "cgroup", *flags, "relatime", "ro"),
        mount("/dev/shm", "bind", bundle / "shm", "rw", "bind"),
        *(
            mount(target, "bind", bundle / file, "rw", "rbind", "rprivate", "bind")
            for file, target in FILES.items()
        ),
    ]


def _rules() -> list[dict[str, Any]]:
    nodes = ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2))
    return [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "access": "m"},
        {"allow": True, "type": "b", "access": "m"},
        *(
            {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"}
            for major, minor in nodes
        ),
        {"allow": True, "type": "c", "major": 136, "access": "rwm"},
    ]


def _annotations(name: str, root: Path) -> dict[str, str]:
    """Return the annotations that CRI-O reads again after a restart."""
    kubelet = {
        "io.kubernetes.container.hash": "3f2a",
        "io.kubernetes.container.restartCount": "0",
        "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
        "io.kubernetes.pod.terminationGracePeriod": "30",
    }
    labels = {
        "io.kubernetes.container.name": "look",
        "io.kubernetes.pod.name": "pod",
        "io.kubernetes.pod.namespace": "default",
        "io.kubernetes.pod.uid": POD,
    }
    own = {
        "Annotations": json.dumps(kubelet),
        "ContainerID": name,
        "ContainerType": "container",
        "Created": "2024-05-01T10:00:00.000000001Z",
        "IP.0": "10.85.0.7",
        "Image": "8" * 64,
        "ImageName": "registry.example/look:1",
        "Labels": json.dumps(labels),
        "LogPath": f"/var/log/pods/default_pod_{POD}/look/0.log",
        "Metadata": json.dumps({"name": "look"}),
        "MountPoint": str(root),
        "Name": f"k8s_look_pod_default_{POD}_0",
        "PlatformRuntimePath": "",
        "ResolvPath": "/run/resolv.conf",
        "SandboxID": "9" * 64,
        "SandboxName": f"k8s_pod_default_{POD}_0",
        "SeccompProfilePath": "",
        "Stdin": "false",
        "StdinOnce": "false",
        "TTY": "false",
        "Volumes": json.dumps([]),
    }
    return {
        **kubelet,
        **labels,
        "io.container.manager": "cri-o",
        "kubernetes.io/config.source": "api",
        **{f"{OURS}.{key}": value for key, value in own.items()},
    }
