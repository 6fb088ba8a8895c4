# SPDX-License-Identifier: Apache-2.0
"""The driver's device nodes, with the numbers that its modules have; reads only /proc and /sys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuruntime.errors import DriverError

NVIDIA, UVM, CAPS, FRONTEND = "nvidia", "nvidia-uvm", "nvidia-caps", "nvidia-frontend"
MODE = 0o666
# Name below /dev, module that has its major, minor; in the order in which they are made.
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
_HINT = 'load the driver\'s modules: "modprobe nvidia-uvm"'


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A device node that there is to be: *name* below /dev, its numbers, its mode and owner."""

    name: str
    major: int
    minor: int
    mode: int = MODE
    uid: int = 0
    gid: int = 0

    @property
    def numbers(self) -> str:
        """The numbers, as names in /dev/char have them."""
        return f"{self.major}:{self.minor}"


def majors(text: str) -> dict[str, int]:
    """Return module → major of what /proc/devices says of NVIDIA's; a later line wins.

    The module was called nvidia-frontend before driver 550.
    """
    found = {name: int(number) for number, name in _LINE.findall(text)}
    if NVIDIA not in found and FRONTEND in found:
        found[NVIDIA] = found[FRONTEND]
    return found


def major_of(known: Mapping[str, int], module: str) -> int:
    """Return the major of *module*; raise DriverError if it is not loaded."""
    if not known:
        raise DriverError("no NVIDIA devices found in /proc/devices", _HINT)
    if module not in known:
        raise DriverError(f"missing required device major {module} in /proc/devices", _HINT)
    return known[module]


def control(known: Mapping[str, int]) -> list[PlannedNode]:
    """Return the control nodes; raise DriverError if a module of theirs is not loaded."""
    return [PlannedNode(name, major_of(known, module), minor) for name, module, minor in _CONTROL]


def gpus(known: Mapping[str, int], minors: Iterable[int]) -> list[PlannedNode]:
    """Return the nodes of the GPUs *minors*; raise DriverError if their module is not loaded."""
    return [PlannedNode(f"nvidia{minor}", major_of(known, NVIDIA), minor) for minor in minors]


def capabilities(
    known: Mapping[str, int], minors: Mapping[str, int], names: Iterable[str]
) -> list[PlannedNode]:
    """Return the nodes of the capabilities *names*, `gpu0/gi1/access`, that have *minors*."""
    found = [name for name in names if name in minors]
    return [
        PlannedNode(
            f"nvidia-caps/nvidia-cap{minors[name]}",
            major_of(known, CAPS),
            minors[name],
            _CAPABILITY_MODES.get(name, 0o444),
        )
        for name in found
    ]


def mig_minors(text: str) -> dict[str, int]:
    """Return capability → minor of what /proc/driver/nvidia-caps/mig-minors says."""
    return {name: int(minor) for name, minor in _MINORS_LINE.findall(text)}


def possible_instances(minors: Mapping[str, int], gpu: int) -> list[str]:
    """Return the capabilities that *gpu* can have, those that are or will be.

    The driver numbers instances from 0 on, without a gap.
    """
    found = []
    instance = 0
    while f"gpu{gpu}/gi{instance}/access" in minors:
        found.append(f"gpu{gpu}/gi{instance}/access")
        compute = 0
        while f"gpu{gpu}/gi{instance}/ci{compute}/access" in minors:
            found.append(f"gpu{gpu}/gi{instance}/ci{compute}/access")
            compute += 1
        instance += 1
    return found


def existing_instances(proc: str = "/proc") -> list[str]:
    """Return the capabilities of the MIG instances that there are now, config and monitor."""
    tree = f"{proc}/driver/nvidia/capabilities"
    found = ["config", "monitor"] if os.path.isdir(f"{tree}/mig") else []
    for gpu in _names(tree, r"gpu\d+"):
        for instance in _names(f"{tree}/{gpu}/mig", r"gi\d+"):
            found.append(f"{gpu}/{instance}/access")
            found += [
                f"{gpu}/{instance}/{compute}/access"
                for compute in _names(f"{tree}/{gpu}/mig/{instance}", r"ci\d+")
            ]
    return found


def gpu_minors(proc: str = "/proc") -> list[int]:
    """Return the minors of the GPUs that the driver has."""
    directory = f"{proc}/driver/nvidia/gpus"
    found = []
    for index, bus_id in enumerate(_names(directory, r".*")):
        text = read(f"{directory}/{bus_id}/information")
        match = re.search(r"^Device Minor:\s*(\d{1,6})", text, re.MULTILINE)
        found.append(int(match[1]) if match else index)
    return sorted(found)


def count_on_bus(sys: str = "/sys") -> int:
    """Return how many GPUs of NVIDIA are on the PCI bus, with a driver or without."""
    directory = f"{sys}/bus/pci/devices"
    return sum(
        read(f"{directory}/{bus_id}/vendor").strip() == "0x10de"
        and read(f"{directory}/{bus_id}/class").startswith(_DISPLAYS)
        for bus_id in _names(directory, r".*")
    )


def ownership(proc: str = "/proc") -> tuple[int, int, int]:
    """Return mode, uid and gid that the driver is told to give its nodes."""
    text = read(f"{proc}/driver/nvidia/params")
    told = dict(re.findall(r"^DeviceFile(Mode|UID|GID): (\d{1,10})$", text, re.MULTILINE))
    return (
        int(told.get("Mode", MODE)) & 0o777,
        int(told.get("UID", 0)),
        int(told.get("GID", 0)),
    )


def read(path: str) -> str:
    """Return the text of the file *path* of the kernel, "" if it cannot be had."""
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
