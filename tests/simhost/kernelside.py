# SPDX-License-Identifier: Apache-2.0
"""What the simulated kernel driver shows: /proc, PCI devices, device nodes, NVML's answers.

Everything is written below a directory given; mounting it is the business of namespace.py.
"""

from __future__ import annotations

import fnmatch
import functools
import grp
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import mig_layout
from artefacts import cuda_version

MODEL = "NVIDIA H100 80GB HBM3"
MEMORY_MIB = 81559
MAX_GPUS = 64
MAX_MIGS = 7
# The profile of MIG devices that are only counted.
USUAL_PROFILE = "1g.10gb"
# Slots of an eight-GPU server; more GPUs get more buses, and then another domain, which needs more
# than four digits.
BUSES = (0x1A, 0x1B, 0x4A, 0x4B, 0x8A, 0x8B, 0xCA, 0xCB)
FAR_DOMAIN = 0x10000
# Faults of which the fake NVML, which knows all others, is not told.
CAPABILITIES = "/proc/driver/nvidia/capabilities"
OTHER_FAULTS = ("nosymbol", "nonode", "no-mig-minors", "no-capabilities", "bound")
NVIDIA_MAJOR = 195
NVIDIA_VENDOR = "0x10de"
DRM_MAJOR = 226
# What has nodes of its own, made by other modules or other programs: module, names of the nodes.
FEATURES = {
    "gds": ("nvidia-fs", ("nvidia-fs0", "nvidia-fs1", "nvidia-fs10", "nvidia-fs2")),
    "mofed": ("infiniband_verbs", ("infiniband/rdma_cm", "infiniband/uverbs0")),
    "gdrcopy": ("gdrdrv", ("gdrdrv",)),
    "nvswitch": ("nvidia-nvswitch", ("nvidia-nvswitch0", "nvidia-nvswitchctl")),
    "cc": ("cc-unused", ("tdx_guest",)),
    "imex": (
        "nvidia-caps-imex-channels",
        tuple(f"nvidia-caps-imex-channels/channel{number}" for number in (0, 2, 10)),
    ),
}

# Nodes of the driver "misc", and a number of its that no driver of this machine has.
_MISC_NODES = ("infiniband/rdma_cm", "tdx_guest")
_MISC = 10, 1048575


# The compute capability of the usual GPU, and its brand, NVIDIA, of nvmlBrandType_t.
ARCH = "9.0"
BRAND = 14


class Mig(NamedTuple):
    """One MIG device: the only compute instance of its GPU instance."""

    index: int
    uuid: str
    instance: mig_layout.Instance
    compute_instance: int = 0

    @property
    def gpu_instance(self) -> int:
        """The id of its GPU instance."""
        return self.instance.number


class Gpu(NamedTuple):
    """One simulated GPU; its minor number is its index. *migs* is None outside of MIG mode."""

    index: int
    uuid: str
    bus_id: str
    card: int
    name: str
    migs: tuple[Mig, ...] | None
    arch: str = ARCH
    brand: int = BRAND
    numa_node: int = 0

    @property
    def capabilities(self) -> list[str]:
        """The capabilities that grant its MIG devices, as `mig-minors` names them."""
        names = []
        for mig in self.migs or ():
            instance = f"gpu{self.index}/gi{mig.gpu_instance}"
            names += [f"{instance}/access", f"{instance}/ci{mig.compute_instance}/access"]
        return names


class Node(NamedTuple):
    """One device node below /dev."""

    path: str
    major: int
    minor: int
    mode: int
    group: str = "root"


class Host(NamedTuple):
    """The simulated machine."""

    version: str
    gpus: tuple[Gpu, ...]
    modify_device_files: bool
    majors: dict[str, int]
    faults: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    cuda: int = 0
    lines: tuple[str, ...] = ()

    def faults_named(self, name: str) -> list[str]:
        """Return the argument of each fault *name*, "" where it has none."""
        faults = (fault.partition(" ") for fault in self.faults)
        return [argument for word, _, argument in faults if word == name]

    def other_drivers(self) -> dict[int, str]:
        """Return GPU → the kernel driver that has it in place of nvidia."""
        pairs = (argument.split() for argument in self.faults_named("bound"))
        return {int(gpu): driver for gpu, driver in pairs}

    def driven(self) -> list[Gpu]:
        """Return the GPUs that the kernel driver nvidia has."""
        others = self.other_drivers()
        return [gpu for gpu in self.gpus if gpu.index not in others]

    def nodes(self) -> list[Node]:
        """Return the device nodes that the driver and its tools would have made."""
        uvm = self.majors["nvidia-uvm"]
        caps = self.majors["nvidia-caps"]
        nodes = [
            *(Node(f"nvidia{gpu.index}", NVIDIA_MAJOR, gpu.index, 0o666) for gpu in self.driven()),
            Node("nvidiactl", NVIDIA_MAJOR, 255, 0o666),
            Node("nvidia-modeset", NVIDIA_MAJOR, 254, 0o666),
            Node("nvidia-uvm", uvm, 0, 0o666),
            Node("nvidia-uvm-tools", uvm, 1, 0o666),
            Node("nvidia-caps/nvidia-cap1", caps, 1, 0o400),
            Node("nvidia-caps/nvidia-cap2", caps, 2, 0o444),
        ]
        for gpu in self.gpus:
            nodes.append(Node(f"dri/card{gpu.card}", DRM_MAJOR, gpu.card, 0o660, "video"))
            render = 128 + gpu.card
            nodes.append(Node(f"dri/renderD{render}", DRM_MAJOR, render, 0o660, "render"))
        minors = mig_minors(len(self.gpus))
        granted = [minors[name] for gpu in self.gpus for name in gpu.capabilities]
        nodes += [Node(f"nvidia-caps/nvidia-cap{minor}", caps, minor, 0o444) for minor in granted]
        for feature in self.features:
            module, paths = FEATURES[feature]
            major = self.majors[module]
            nodes += [
                Node(path, *_MISC, 0o666)
                if path in _MISC_NODES
                else Node(path, major, minor, 0o666)
                for minor, path in enumerate(paths)
            ]
        missing = self.faults_named("nonode")
        return [n for n in nodes if not any(fnmatch.fnmatch(n.path, m) for m in missing)]


class Facts(NamedTuple):
    """What the fake NVML says that is not the usual: CUDA's version, and facts by GPU.

    *lines* are further lines for it; *numa* is the NUMA node of a GPU in sysfs.
    """

    cuda: int = 0
    archs: Mapping[int, str] = MappingProxyType({})
    brands: Mapping[int, int] = MappingProxyType({})
    numa: Mapping[int, int] = MappingProxyType({})
    lines: tuple[str, ...] = ()


def plan_host(
    version: str,
    count: int,
    *,
    modify_device_files: bool,
    names: dict[int, str] | None = None,
    migs: Mapping[int, Sequence[str]] | None = None,
    faults: Sequence[str] = (),
    features: Sequence[str] = (),
    facts: Facts | None = None,
) -> Host:
    """Return a host of *count* GPUs whose dynamic majors nothing on this machine uses.

    *names* are those of GPUs that are no usual one; *migs* has the profiles of the MIG devices of
    each GPU in MIG mode. *features*, of FEATURES, have their nodes.
    """
    names, migs, facts = names or {}, migs or {}, facts or Facts()
    taken = _taken_majors(Path("/proc/devices").read_text(encoding="ascii"))
    majors = {}
    # A node with a major in use here would open somebody else's device.
    others = ((FEATURES[name][0], 235) for name in features)
    for name, preferred in (("nvidia-uvm", 511), ("nvidia-caps", 236), *others):
        majors[name] = next(major for major in range(preferred, 0, -1) if major not in taken)
        taken.add(majors[name])
    card = 1
    while any(
        os.path.exists(f"/sys/dev/char/{DRM_MAJOR}:{minor}")
        for first in (card, 128 + card)
        for minor in range(first, first + count)
    ):
        card += 1
    gpus = tuple(
        Gpu(
            index,
            f"GPU-{0x5F1E0000 + index:08x}-9a3c-4d27-8b60-{0xC1D2E3F4A00 + index:012x}",
            _bus_id(index),
            card + index,
            names.get(index, MODEL),
            _migs(index, migs[index]) if index in migs else None,
            facts.archs.get(index, ARCH),
            facts.brands.get(index, BRAND),
            # Half of the GPUs at each of two CPU sockets.
            facts.numa.get(index, index * 2 // count),
        )
        for index in range(count)
    )
    cuda = facts.cuda or cuda_version(version)
    return Host(
        *(version, gpus, modify_device_files, majors, tuple(faults), tuple(features)),
        cuda=cuda,
        lines=facts.lines,
    )


def _bus_id(index: int) -> str:
    """Return the bus id of GPU *index* as sysfs spells it."""
    if index < len(BUSES):
        return f"0000:{BUSES[index]:02x}:00.0"
    bus = 0xD0 + index - len(BUSES)
    return f"0000:{bus:02x}:00.0" if bus <= 0xFF else f"{FAR_DOMAIN:04x}:{bus - 0xFF:02x}:00.0"


def _migs(gpu: int, profiles: Sequence[str]) -> tuple[Mig, ...]:
    return tuple(
        Mig(
            index,
            f"MIG-{0x3A7C0000 + 16 * gpu + index:08x}-51d2-5e0b-9f14-{0xB2A3C4D5E00 + gpu:012x}",
            instance,
        )
        for index, instance in enumerate(mig_layout.place(profiles))
    )


def nvml_conf(host: Host) -> str:
    """Return fakenvml.conf for *host*."""
    faults = [f for f in host.faults if f.partition(" ")[0] not in OTHER_FAULTS]
    lines = [
        f"driver {host.version}",
        f"nvml 12.{host.version}",
        f"cuda {host.cuda}",
        *(
            f"gpu {g.uuid} {g.index} {g.bus_id} {MEMORY_MIB} {int(g.migs is not None)} {g.name}"
            for g in host.driven()
        ),
        *(f"arch {i} {g.arch.replace('.', ' ')}" for i, g in enumerate(host.driven())),
        *(f"brand {i} {g.brand}" for i, g in enumerate(host.driven())),
        *(
            line
            for i, g in enumerate(host.driven())
            for m in g.migs or ()
            for line in _mig_lines(i, m)
        ),
        # The simulated kernel's list of MIG instances follows changes of MIG.
        f"capabilities {CAPABILITIES}",
        *(f if f.startswith("initdelay_us ") else f"fault {f}" for f in faults),
        *host.lines,
    ]
    return "".join(f"{line}\n" for line in lines)


def _mig_lines(gpu: int, mig: Mig) -> list[str]:
    instance, profile = mig.instance, mig.instance.profile
    size = f"{profile.slices} {profile.slices} {profile.memory_mib}"
    place = f"{instance.start} {profile.memory_slices} {profile.number}"
    return [
        f"mig {gpu} {mig.index} {mig.uuid} {instance.number} {mig.compute_instance} {size}",
        f"miginstance {gpu} {mig.index} {place}",
    ]


def write_proc_driver(host: Host, directory: Path) -> None:
    """Write what /proc/driver holds into *directory*."""
    nvidia = directory / "nvidia"
    (nvidia / "gpus").mkdir(parents=True)
    (nvidia / "version").write_text(
        f"NVRM version: NVIDIA UNIX {os.uname().machine} Kernel Module  {host.version}  Fake\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    (nvidia / "params").write_text(
        "ResmanDebugLevel: 4294967295\n"
        "RmLogonRC: 1\n"
        f"ModifyDeviceFiles: {int(host.modify_device_files)}\n"
        "DeviceFileUID: 0\n"
        "DeviceFileGID: 0\n"
        "DeviceFileMode: 438\n"
        "EnableMSI: 1\n"
        'RegistryDwords: ""\n'
        'ExcludedGpus: ""\n'
    )
    for gpu in host.driven():
        entry = nvidia / "gpus" / gpu.bus_id
        entry.mkdir()
        (entry / "information").write_text(
            f"Model: \t\t {gpu.name}\n"
            f"IRQ:   \t\t {100 + gpu.index}\n"
            f"GPU UUID: \t {gpu.uuid}\n"
            "Video BIOS: \t 96.00.5e.00.01\n"
            "Bus Type: \t PCIe\n"
            "DMA Size: \t 52 bits\n"
            "DMA Mask: \t 0xfffffffffffff\n"
            f"Bus Location: \t {gpu.bus_id}\n"
            f"Device Minor: \t {gpu.index}\n"
            f"GPU Firmware: \t {host.version}\n"
            "GPU Excluded:\t No\n"
        )
    caps = directory / "nvidia-caps"
    caps.mkdir()
    minors = mig_minors(len(host.gpus))
    if not host.faults_named("no-mig-minors"):
        lines = (f"{name} {minor}\n" for name, minor in minors.items())
        (caps / "mig-minors").write_text("".join(lines))
    if not host.faults_named("no-capabilities"):
        _write_capabilities(host, nvidia / "capabilities", minors)
    (caps / "nvlink-minors").write_text("fabric-mgmt 1\n")
    (caps / "sys-minors").write_text("fabric-imex-mgmt 1\n")
    for path in directory.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)


def _write_capabilities(host: Host, tree: Path, minors: dict[str, int]) -> None:
    """Write the tree of capabilities: those of the instances that there are, each a file."""
    files = {"mig/config": ("config", 0o400), "mig/monitor": ("monitor", 0o444)}
    for gpu in host.gpus:
        for name in gpu.capabilities:
            top, _, rest = name.partition("/")
            files[f"{top}/mig/{rest}"] = (name, 0o444)
        if gpu.migs is not None:
            (tree / f"gpu{gpu.index}/mig").mkdir(parents=True, exist_ok=True)
    for file, (name, mode) in files.items():
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(
            f"DeviceFileMinor: {minors[name]}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        )


def proc_devices(host: Host, machine: str) -> str:
    """Return /proc/devices as the machine's own text *machine* plus the driver's majors."""
    character, separator, block = machine.partition("\nBlock devices:")
    ours = [
        f"{NVIDIA_MAJOR} nvidia",
        f"{NVIDIA_MAJOR} nvidia-modeset",
        f"{NVIDIA_MAJOR} nvidiactl",
        f"{DRM_MAJOR} drm",
        *(f"{major} {name}" for name, major in host.majors.items()),
    ]
    # Sorted by number, as the kernel prints them; the machine may have drm already.
    lines = dict.fromkeys([*character.split("\n")[1:], *ours])
    ordered = sorted((line.strip() for line in lines if line.strip()), key=_major_of)
    body = "".join(f"{_major_of(line):3d} {line.split(None, 1)[1]}\n" for line in ordered)
    return f"Character devices:\n{body}{separator}{block}"


def write_pci_devices(host: Host, directory: Path) -> None:
    """Write what /sys/bus/pci/devices holds: the machine's own entries and the GPUs."""
    directory.mkdir()
    machine = Path("/sys/bus/pci/devices")
    if machine.is_dir():
        for entry in machine.iterdir():
            # A GPU of the machine is none of the simulated host.
            vendor = entry / "vendor"
            if not (vendor.is_file() and vendor.read_text().strip() == NVIDIA_VENDOR):
                (directory / entry.name).symlink_to(entry.resolve())
    for gpu in host.gpus:
        entry = directory / gpu.bus_id
        (entry / "drm" / f"card{gpu.card}").mkdir(parents=True)
        (entry / "drm" / f"renderD{128 + gpu.card}").mkdir()
        driver = host.other_drivers().get(gpu.index, "nvidia")
        (entry / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        (entry / "vendor").write_text(f"{NVIDIA_VENDOR}\n")
        (entry / "device").write_text("0x2330\n")
        (entry / "class").write_text("0x030200\n")
        (entry / "numa_node").write_text(f"{gpu.numa_node}\n")


def make_nodes(host: Host, dev: Path) -> None:
    """Make the driver's device nodes below *dev*, and the links to the DRM nodes by bus id."""
    for node in host.nodes():
        path = dev / node.path
        path.parent.mkdir(exist_ok=True)
        os.mknod(path, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor))
        path.chmod(node.mode)
        os.chown(path, 0, _group(node.group))
    by_path = dev / "dri/by-path"
    by_path.mkdir(exist_ok=True)
    for gpu in host.gpus:
        (by_path / f"pci-{gpu.bus_id}-card").symlink_to(f"../card{gpu.card}")
        (by_path / f"pci-{gpu.bus_id}-render").symlink_to(f"../renderD{128 + gpu.card}")


def _taken_majors(proc_devices_text: str) -> set[int]:
    character = proc_devices_text.partition("Block devices:")[0]
    return {_major_of(line) for line in character.split("\n")[1:] if line.strip()}


def _major_of(line: str) -> int:
    return int(line.split(maxsplit=1)[0])


@functools.cache
def _group(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return 0


@functools.cache
def mig_minors(gpus: int) -> dict[str, int]:
    """Return every capability there can be: the driver lists them with or without the GPUs."""
    names = ["config", "monitor"]
    for gpu in range(max(gpus, 32)):
        for instance in range(15):
            names.append(f"gpu{gpu}/gi{instance}/access")
            names += [f"gpu{gpu}/gi{instance}/ci{compute}/access" for compute in range(8)]
    return {name: minor for minor, name in enumerate(names, 1)}
