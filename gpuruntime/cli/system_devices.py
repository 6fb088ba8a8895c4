# SPDX-License-Identifier: Apache-2.0
"""The driver's device nodes and their numbers; reads only /proc and /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuruntime import remedies
from gpuruntime.errors import DriverError

NVIDIA, UVM, CAPS, FRONTEND = "nvidia", "nvidia-uvm", "nvidia-caps", "nvidia-frontend"
MODE = 0o666
# Name below /dev, module that registers the major, minor; in the order of creation.
_CONTROL = (
    ("nvidiactl", NVIDIA, 255),
    ("nvidia-modeset", NVIDIA, 254),
    ("nvidia-uvm", UVM, 0),
    ("nvidia-uvm-tools", UVM, 1),
)
_LINE = re.compile(r"^\s*(\d{1,9})\s+(nvidia\S*)\s*$", re.MULTILINE)
_MINORS_LINE = re.compile(r"^(\S+) (\d{1,9})$", re.MULTILINE)
_DISPLAYS = ("0x0300", "0x0302")
_MAX_BYTES = 4 << 20
_CAPABILITY_MODES = {"config": 0o400}


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A device node to create: *name* below /dev, its numbers, its mode and owner."""

    name: str
    major: int
    minor: int
    mode: int = MODE
    uid: int = 0
    gid: int = 0

    @property
    def numbers(self) -> str:
        """The numbers, in the form of the names in /dev/char."""
        return f"{self.major}:{self.minor}"


def majors(text: str) -> dict[str, int]:
    """Return module → major for NVIDIA's modules in *text*, /proc/devices; a later line wins.

    The module was called nvidia-frontend before driver 550.
    """
    by_module = {name: int(number) for number, name in _LINE.findall(text)}
    if NVIDIA not in by_module and FRONTEND in by_module:
        by_module[NVIDIA] = by_module[FRONTEND]
    return by_module


def major_of(by_module: Mapping[str, int], module: str) -> int:
    """Return the major of *module*; raise DriverError if it is not loaded."""
    if not by_module:
        why, action = remedies.unloaded_module(remedies.LiveHost())
        raise DriverError(f"no NVIDIA devices found in /proc/devices: {why}", action)
    if module not in by_module:
        raise DriverError(
            f"missing required device major {module} in /proc/devices", remedies.create_nodes()
        )
    return by_module[module]


def control(by_module: Mapping[str, int]) -> list[PlannedNode]:
    """Return the control nodes; raise DriverError if one of their modules is not loaded."""
    return [
        PlannedNode(name, major_of(by_module, module), minor) for name, module, minor in _CONTROL
    ]


def gpus(by_module: Mapping[str, int], minors: Iterable[int]) -> list[PlannedNode]:
    """Return the nodes of the GPUs *minors*; raise DriverError if their module is not loaded."""
    return [PlannedNode(f"nvidia{minor}", major_of(by_module, NVIDIA), minor) for minor in minors]


def capabilities(
    by_module: Mapping[str, int], minors: Mapping[str, int], names: Iterable[str]
) -> list[PlannedNode]:
    """Return the nodes of the capabilities *names*, such as `gpu0/gi1/access`, in *minors*."""
    return [
        PlannedNode(
            f"nvidia-caps/nvidia-cap{minors[name]}",
            major_of(by_module, CAPS),
            minors[name],
            _CAPABILITY_MODES.get(name, 0o444),
        )
        for name in names
        if name in minors
    ]


def mig_minors(text: str) -> dict[str, int]:
    """Return capability → minor from *text*, /proc/driver/nvidia-caps/mig-minors."""
    return {name: int(minor) for name, minor in _MINORS_LINE.findall(text)}


def possible_instances(minors: Mapping[str, int], gpu: int) -> list[str]:
    """Return the capabilities that *gpu* can have, of existing and of future instances.

    The driver numbers instances from 0 without gaps.
    """
    names = []
    instance = 0
    while f"gpu{gpu}/gi{instance}/access" in minors:
        names.append(f"gpu{gpu}/gi{instance}/access")
        compute = 0
        while f"gpu{gpu}/gi{instance}/ci{compute}/access" in minors:
            names.append(f"gpu{gpu}/gi{instance}/ci{compute}/access")
            compute += 1
        instance += 1
    return names


def existing_instances(proc: str = "/proc") -> list[str]:
    """Return the capabilities of the existing MIG instances, and "config" and "monitor"."""
    tree = f"{proc}/driver/nvidia/capabilities"
    names = ["config", "monitor"] if os.path.isdir(f"{tree}/mig") else []
    for gpu in _names(tree, r"gpu\d+"):
        for instance in _names(f"{tree}/{gpu}/mig", r"gi\d+"):
            names.append(f"{gpu}/{instance}/access")
            names += [
                f"{gpu}/{instance}/{compute}/access"
                for compute in _names(f"{tree}/{gpu}/mig/{instance}", r"ci\d+")
            ]
    return names


def gpu_minors(proc: str = "/proc") -> list[int]:
    """Return the minors of the GPUs that the driver reports."""
    directory = f"{proc}/driver/nvidia/gpus"
    minors = []
    for index, bus_id in enumerate(_names(directory, r".*")):
        text = read(f"{directory}/{bus_id}/information")
        match = re.search(r"^Device Minor:\s*(\d{1,6})", text, re.MULTILINE)
        minors.append(int(match[1]) if match else index)
    return sorted(minors)


def count_on_bus(sys: str = "/sys") -> int:
    """Return the number of NVIDIA GPUs on the PCI bus, with a driver or without."""
    directory = f"{sys}/bus/pci/devices"
    return sum(
        read(f"{directory}/{bus_id}/vendor").strip() == "0x10de"
        and read(f"{directory}/{bus_id}/class").startswith(_DISPLAYS)
        for bus_id in _names(directory, r".*")
    )


def ownership(proc: str = "/proc") -> tuple[int, int, int]:
    """Return the mode, uid and gid of new nodes from the driver's parameters."""
    text = read(f"{proc}/driver/nvidia/params")
    parameters = dict(re.findall(r"^DeviceFile(Mode|UID|GID): (\d{1,10})$", text, re.MULTILINE))
    return (
        int(parameters.get("Mode", MODE)) & 0o777,
        int(parameters.get("UID", 0)),
        int(parameters.get("GID", 0)),
    )


def read(path: str) -> str:
    """Return the text of the kernel's file *path*, "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(_MAX_BYTES)
    except OSError:
        return ""


def _names(directory: str, pattern: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return sorted(name for name in names if re.fullmatch(pattern, name))
