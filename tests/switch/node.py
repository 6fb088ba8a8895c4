# SPDX-License-Identifier: Apache-2.0
"""A node with the incumbent: its config.toml, its CDI specs, the configs of engines.

The files are as the package of the incumbent and its `runtime configure` write them, with settings
of the operator. Stand-ins that add nothing replace its programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

PROGRAMS = Path("/usr/bin")
RUNTIME = "nvidia-container-runtime"
RUNTIMES = (RUNTIME, f"{RUNTIME}.cdi", f"{RUNTIME}.legacy")
HOOKS = (f"{RUNTIME}-hook", "nvidia-container-toolkit", "nvidia-cdi-hook", "nvidia-ctk")
CONFIG = Path(f"/etc/{RUNTIME}/config.toml")
DAEMON = Path("/etc/docker/daemon.json")
CONTAINERD = Path("/etc/containerd/config.toml")
# Of version 3, which only containerd 2 reads.
CONTAINERD_3 = Path("/etc/containerd-3/config.toml")
CRIO = Path("/etc/crio/crio.conf")
CRIO_DROP_IN = Path("/etc/crio/crio.conf.d/99-nvidia.toml")
PODMAN = Path("/etc/containers/containers.conf")
SPEC = Path("/etc/cdi/nvidia.yaml")
# Of an older version: its hooks run the tool itself, without an environment.
OLD_SPEC = Path("/var/run/cdi/nvidia-old.yaml")
KIND, OLD_KIND = "nvidia.com/gpu", "old.nvidia.com/gpu"
VERSION = "550.163.01"
GPUS = range(8)
LIBRARIES = f"/usr/lib/{platform.machine()}-linux-gnu"
_CONTROL = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")

CONFIG_TEXT = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
#debug = "/var/log/nvidia-container-toolkit.log"
environment = []
#ldcache = "/etc/ld.so.cache"
ldconfig = "@/sbin/ldconfig"
load-kmods = true
#no-cgroups = false
#path = "/usr/bin/nvidia-container-cli"
#root = "/run/nvidia/driver"
#user = "root:video"

[nvidia-container-runtime]
#debug = "/var/log/nvidia-container-runtime.log"
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"
"""
DAEMON_TEXT = """\
{
    "log-opts": {
        "max-size": "10m"
    },
    "runtimes": {
        "nvidia": {
            "args": [],
            "path": "nvidia-container-runtime"
        },
        "nvidia-cdi": {
            "args": [],
            "path": "/usr/bin/nvidia-container-runtime.cdi"
        },
        "nvidia-legacy": {
            "args": [],
            "path": "/usr/bin/nvidia-container-runtime.legacy"
        }
    }
}"""
# The first lines belong to the operator; the import belongs to the incumbent.
_CONTAINERD_TEXT = """\
imports = ["@HERE@/conf.d/*.toml"]
root = "@WORK@/root"
state = "@WORK@/state"
version = @VERSION@

[grpc]
  address = "@WORK@/containerd.sock"

# The pods of this node have no registry.
[plugins]
@CRI@
"""
_CRI = {
    2: """\
  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "@PAUSE@"
    stream_server_port = "0"
    restrict_oom_score_adj = true

    [plugins."io.containerd.grpc.v1.cri".containerd]
      default_runtime_name = "runc"

      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"

        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
          SystemdCgroup = false""",
    3: """\
  [plugins."io.containerd.cri.v1.runtime"]
    restrict_oom_score_adj = true

    [plugins."io.containerd.cri.v1.runtime".containerd]
      default_runtime_name = "runc"

      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"

        [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
          SystemdCgroup = false""",
}
_PLUGIN = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
# A copy of all settings of the plugin, with the runtime added.
_DROP_IN_TEXT = """\
version = @VERSION@

[plugins]

@CRI@

      [plugins."@PLUGIN@".containerd.runtimes.nvidia]
        runtime_type = "io.containerd.runc.v2"

        [plugins."@PLUGIN@".containerd.runtimes.nvidia.options]
          BinaryName = "/usr/bin/nvidia-container-runtime"
          SystemdCgroup = false
"""
CRIO_TEXT = """\
[crio.runtime]
# The operator's.
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"

[crio.runtime.runtimes.runc]
runtime_path = "/usr/sbin/runc"
"""
CRIO_DROP_IN_TEXT = """\

[crio]

  [crio.runtime]

    [crio.runtime.runtimes]

      [crio.runtime.runtimes.nvidia]
        runtime_path = "/usr/bin/nvidia-container-runtime"
        runtime_type = "oci"
"""
PODMAN_TEXT = """\
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"

[engine.runtimes]
nvidia = ["/usr/bin/nvidia-container-runtime"]
"""


def containerd_texts(version: int, here: Path, work: Path, pause: str) -> tuple[str, str]:
    """Return the main file and the drop-in of a containerd config in the directory *here*."""
    values = {
        "CRI": _CRI[version],
        "PLUGIN": _PLUGIN[version],
        "VERSION": str(version),
        "HERE": str(here),
        "WORK": str(work),
        "PAUSE": pause,
    }
    main, drop_in = _CONTAINERD_TEXT, _DROP_IN_TEXT
    # The first value contains placeholders of the others.
    for name, value in values.items():
        main = main.replace(f"@{name}@", value)
        drop_in = drop_in.replace(f"@{name}@", value)
    return main, drop_in


def _links() -> list[str]:
    """Return the links that the create-symlinks hook of the incumbent creates."""
    named = [
        f"{name}.so.{VERSION}::{LIBRARIES}/{name}.so.1"
        for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler")
    ]
    return [f"libcuda.so.1::{LIBRARIES}/libcuda.so", *named]


def hooks(program: Path, *, env: bool) -> list[dict[str, Any]]:
    """Return the hooks of a CDI spec in the form of the incumbent, which run *program*.

    Without *env* they have no environment, as in older versions.
    """
    words = [program.name, *(["hook"] if program.name == "nvidia-ctk" else [])]
    steps = {
        "create-symlinks": [word for link in _links() for word in ("--link", link)],
        "enable-cuda-compat": [f"--host-driver-version={VERSION}"],
        "update-ldcache": ["--folder", LIBRARIES],
        "disable-device-node-modification": [],
        "update-application-profile": [],
        "chmod": ["--mode", "755", "--path", "/dev"],
    }
    return [
        {
            "hookName": "createContainer",
            "path": str(program),
            "args": [*words, name, *more],
            **({"env": ["NVIDIA_CTK_DEBUG=false"]} if env else {}),
        }
        for name, more in steps.items()
    ]


def spec_text(kind: str, hook_list: list[dict[str, Any]]) -> str:
    """Return a CDI spec in the form of the incumbent with *hook_list*."""
    libraries = sorted(Path(LIBRARIES).glob(f"lib*.so.{VERSION}"))
    mounts = [
        {
            "hostPath": str(path),
            "containerPath": str(path),
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        }
        for path in (*libraries, Path("/usr/bin/nvidia-smi"))
    ]
    devices = [(str(gpu), [f"nvidia{gpu}"]) for gpu in GPUS]
    devices.append(("all", [f"nvidia{gpu}" for gpu in GPUS]))
    document: dict[str, Any] = {
        "cdiVersion": "0.5.0",
        "kind": kind,
        "devices": [
            {
                "name": name,
                "containerEdits": {"deviceNodes": [{"path": f"/dev/{node}"} for node in nodes]},
            }
            for name, nodes in devices
        ],
        "containerEdits": {
            "env": [f"NVIDIA_CTK_LIBCUDA_DIR={LIBRARIES}", "NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": f"/dev/{node}"} for node in _CONTROL],
            "hooks": hook_list,
            "mounts": mounts,
        },
    }
    return f"---\n{_yaml(document)}"


def _yaml(document: Any, indent: str = "") -> str:
    """Return *document* in block style, indented by four like the incumbent; scalars are JSON."""
    lines = []
    if isinstance(document, dict):
        for name, value in document.items():
            if isinstance(value, dict | list):
                lines.append(f"{indent}{name}:\n{_yaml(value, f'{indent}    ')}")
            else:
                lines.append(f"{indent}{name}: {json.dumps(value)}\n")
    else:
        for value in document:
            text = _yaml(value, f"{indent}  ") if isinstance(value, dict) else ""
            text = text[len(indent) + 2 :] or f"{json.dumps(value)}\n"
            lines.append(f"{indent}- {text}")
    return "".join(lines)


def write(work: Path, pause: str) -> list[Path]:
    """Write all files of the node except the programs, and return their paths."""
    texts = {
        CONFIG: CONFIG_TEXT,
        DAEMON: DAEMON_TEXT,
        CRIO: CRIO_TEXT,
        CRIO_DROP_IN: CRIO_DROP_IN_TEXT,
        PODMAN: PODMAN_TEXT,
        SPEC: spec_text(KIND, hooks(PROGRAMS / "nvidia-cdi-hook", env=True)),
        OLD_SPEC: spec_text(OLD_KIND, hooks(PROGRAMS / "nvidia-ctk", env=False)),
    }
    for version, path in ((2, CONTAINERD), (3, CONTAINERD_3)):
        main, drop_in = containerd_texts(version, path.parent, work, pause)
        texts |= {path: main, path.parent / "conf.d" / "99-nvidia.toml": drop_in}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    return list(texts)


def put_stand_ins(calls: Path) -> None:
    """Write stand-ins for the programs of the incumbent; they record their calls in *calls*.

    The runtimes execute the low-level runtime; the hooks do nothing.
    """
    for name in RUNTIMES:
        text = f'#!/bin/sh\necho {name} >> "{calls}"\nexec runc "$@"\n'
        (PROGRAMS / name).write_text(text)
    for name in HOOKS:
        (PROGRAMS / name).write_text("#!/bin/sh\nexec cat >/dev/null\n")
    for name in (*RUNTIMES, *HOOKS):
        (PROGRAMS / name).chmod(0o755)


def remove_stand_ins() -> None:
    """Remove the stand-ins, as the removal of the package does; the config stays."""
    for name in (*RUNTIMES, *HOOKS):
        (PROGRAMS / name).unlink()


def digests(paths: list[Path]) -> dict[str, str]:
    """Return path → SHA-256 of the files *paths*; "" for a missing file."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
        for path in paths
    }


def tree(*tops: str) -> dict[str, str]:
    """Return path → mode, owner and size of everything below *tops*."""
    entries = {}
    for top in tops:
        for directory, names, others in os.walk(top):
            for name in (*names, *others):
                path = os.path.join(directory, name)
                status = os.lstat(path)
                # The size of a directory changes with files that were created and removed.
                size = "" if os.path.isdir(path) else status.st_size
                entries[path] = f"{status.st_mode:o} {status.st_uid} {size}"
    return entries
