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
_MPS = ("/run/nvidia/mps", "/tmp/nvidia-mps")  # noqa: S108 (the default directory of MPS)
_EXPORTER_FLAG = "--kubernetes-virtual-gpus"
_EXPORTER_VARIABLE = "KUBERNETES_VIRTUAL_GPUS"
_DEB = re.compile(r"^\s*deb(?:-src)?\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)", re.MULTILINE)


def selinux(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether SELinux lets containers use devices."""
    enforcing = (machine.read(f"{_SELINUX}/enforce") or "").strip()
    if not enforcing:
        yield ok("SELinux is not in use")
        return
    value = (machine.read(f"{_SELINUX}/booleans/{_BOOLEAN}") or "").split()
    if enforcing != "1":
        yield ok("permissive")
    elif value[:1] == ["1"]:
        yield ok(f"enforcing, and {_BOOLEAN} is on")
    elif value:
        yield warn(
            f"enforcing, and {_BOOLEAN} is off: confined containers may not open device nodes",
            f'run "setsebool -P {_BOOLEAN} on"',
        )
    else:
        yield warn(
            f"enforcing, and its policy has no {_BOOLEAN}: confined containers may not open "
            "device nodes",
            "install container-selinux",
        )


def sharing(machine: ExaminedMachine) -> Iterator[Note]:
    """Report how containers share GPUs: by MIG, by MPS, or without any limit of memory."""
    daemons = processes.running(machine, "nvidia-cuda-mps-control")
    for directory in _MPS:
        status = machine.status(directory)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue
        if not daemons:
            yield warn(
                f'"{directory}" exists, and no nvidia-cuda-mps-control runs: programs that use '
                "MPS wait for it forever",
                'run "nvidia-cuda-mps-control -d"',
            )
        else:
            yield ok(f'MPS uses "{directory}", and can limit the memory of each client')
        return
    instances = [
        name
        for name in devices.existing_instances(machine.path("/proc"))
        if name.startswith("gpu")
    ]
    if instances:
        yield ok("by MIG: each MIG device has its own memory")
    else:
        yield ok("no MIG device and no MPS: containers with the same GPU share all of its memory")


def metrics(machine: ExaminedMachine) -> Iterator[Note]:
    """Check whether the metrics of dcgm-exporter distinguish pods that share a GPU."""
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
            yield ok("dcgm-exporter can tell apart pods that share a GPU")
        else:
            yield warn(
                "dcgm-exporter runs without virtual GPUs: its metrics do not tell apart pods that "
                "share a GPU",
                f'start it with "{_EXPORTER_FLAG}"',
            )


def packages(machine: ExaminedMachine) -> Iterator[Note]:
    """Check for conflicts of two package sources, which make apt refuse both."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    count = 0
    for path in machine.glob(_SOURCES, "*.list"):
        if not re.search(r"nvidia", machine.read(path) or "", re.IGNORECASE):
            continue
        for options, address, suite in _DEB.findall(machine.read(path) or ""):
            count += 1
            match = re.search(r"signed-by=(\S+)", options)
            key = match[1] if match else ""
            first, first_key = seen.setdefault((address.rstrip("/"), suite), (path, key))
            if first_key != key:
                is_first_usable = not first_key or machine.exists(first_key)
                yield warn(
                    f'"{first}" and "{path}" have the same source with different keys: apt '
                    "refuses both",
                    f'remove "{path if is_first_usable else first}"',
                )
    yield ok(f"{count} source(s) of NVIDIA packages" if count else "no source of NVIDIA packages")
