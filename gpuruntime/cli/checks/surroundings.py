# SPDX-License-Identifier: Apache-2.0
"""Checks of the surroundings: SELinux, sharing of GPUs, GPU metrics, package sources."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator

from gpuruntime.cli import system_devices as devices
from gpuruntime.cli.checks import processes
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.checks.finding import Note, ok, warn

_SELINUX = "/sys/fs/selinux"
_BOOLEAN = "container_use_devices"
_SOURCES = "/etc/apt/sources.list.d"
_MPS = ("/run/nvidia/mps", "/tmp/nvidia-mps")  # noqa: S108 (where MPS has its pipes by default)
_EXPORTER_FLAG = "--kubernetes-virtual-gpus"
_EXPORTER_VARIABLE = "KUBERNETES_VIRTUAL_GPUS"
_DEB = re.compile(r"^\s*deb(?:-src)?\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)", re.MULTILINE)


def selinux(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether SELinux lets containers use devices."""
    enforcing = (machine.read(f"{_SELINUX}/enforce") or "").strip()
    if not enforcing:
        yield ok("not in use")
        return
    value = (machine.read(f"{_SELINUX}/booleans/{_BOOLEAN}") or "").split()
    if enforcing != "1":
        yield ok("permissive")
    elif value[:1] == ["1"]:
        yield ok(f"enforcing, and {_BOOLEAN} is on")
    elif value:
        yield warn(
            f"enforcing, and {_BOOLEAN} is off: confined containers may not open the nodes",
            f'run "setsebool -P {_BOOLEAN} on"',
        )
    else:
        yield warn(
            f"enforcing, and its policy has no {_BOOLEAN}: confined containers may not open the "
            "nodes",
            "install container-selinux",
        )


def sharing(machine: ExaminedMachine) -> Iterator[Note]:
    """See how containers share GPUs: by MIG, by MPS, or each with all of the memory."""
    daemons = processes.running(machine, "nvidia-cuda-mps-control")
    for directory in _MPS:
        status = machine.status(directory)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue
        if not daemons:
            yield warn(
                f'"{directory}" is there, and no nvidia-cuda-mps-control runs: programs that wait '
                "for MPS wait for ever",
                "start the daemon on the host, or remove the directory",
            )
        else:
            yield ok(f'MPS has its pipes in "{directory}": it can limit memory for each client')
        return
    instances = [
        name
        for name in devices.existing_instances(machine.path("/proc"))
        if name.startswith("gpu")
    ]
    if instances:
        yield ok("by MIG: each device has memory of its own")
    else:
        yield ok("no MIG device and no MPS: containers with the same GPU share all of its memory")


def metrics(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether metrics of shared GPUs can be told apart by pod."""
    exporters = processes.running(machine, "dcgm-exporter")
    if not exporters:
        yield ok("no dcgm-exporter runs")
        return
    for exporter in exporters:
        text = machine.read(f"/proc/{exporter.pid}/environ") or ""
        is_set = any(
            entry.partition("=")[0] == _EXPORTER_VARIABLE
            and entry.partition("=")[2] in ("1", "t", "T", "true", "TRUE", "True")
            for entry in text.split("\0")
        )
        if is_set or any(word.startswith(_EXPORTER_FLAG) for word in exporter.words):
            yield ok("dcgm-exporter tells pods apart that share a GPU")
        else:
            yield warn(
                "dcgm-exporter runs without its virtual GPUs: pods that share a GPU are not told "
                "apart",
                f'start it with "{_EXPORTER_FLAG}"',
            )


def packages(machine: ExaminedMachine) -> Iterator[Note]:
    """See whether two sources of packages are in conflict, so that nothing can be updated."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    count = 0
    for path in machine.glob(_SOURCES, "*.list"):
        if not re.search(r"nvidia", machine.read(path) or "", re.IGNORECASE):
            continue
        for options, address, suite in _DEB.findall(machine.read(path) or ""):
            count += 1
            found = re.search(r"signed-by=(\S+)", options)
            key = found[1] if found else ""
            other, known = seen.setdefault((address.rstrip("/"), suite), (path, key))
            if known != key:
                yield warn(
                    f'"{other}" and "{path}" have the same source with different keys: apt '
                    "refuses both",
                    f'remove "{other}" or "{path}"',
                )
    yield ok(f"{count} source(s) of NVIDIA's packages" if count else "no source of NVIDIA's here")
