# SPDX-License-Identifier: Apache-2.0
"""The table of platforms: how each is recognised, and which discovery mode it needs.

docs/reference/platforms.md has the same rows, and what was tested on each.
"""

from __future__ import annotations

import posixpath

from gpuruntime.discover import search_paths
from gpuruntime.model import CSV, NVML, WSL
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuruntime.discover.device_nodes import DevRoot
    from gpuruntime.discover.nvml import Answer
    from gpuruntime.discover.root import DriverRoot
    from gpuruntime.model import Gpu

AUTO = "auto"
DXG = "/dev/dxg"
# Nodes of each platform, one of which shows that a directory has the nodes.
NODES = ("/dev/nvidiactl", DXG, "/dev/nvmap")
DXCORE = "libdxcore.so"
WSL_LIBRARIES = "/usr/lib/wsl/lib"
WSL_DRIVERS = "/usr/lib/wsl/drivers"
KERNEL_RELEASE = "/proc/sys/kernel/osrelease"
TEGRA_RELEASE = "/etc/nv_tegra_release"
TEGRA_FAMILY = "/sys/devices/soc0/family"
_MAX_BYTES = 256
# Parts of the names of GPUs that are part of a Tegra.
_INTEGRATED = ("(nvgpu)", "NVIDIA Thor")
# The first device of the PCI domain that an integrated GPU has on some boards.
_INTEGRATED_BUS_ID = "0000:01:00.0"


class Platform(Record):
    """A kind of machine: its discovery *mode*, and the *marks* by which it is recognised.

    *nodes* are the device nodes of a container, *files* is where its driver files come from.
    """

    __slots__ = ("files", "marks", "mode", "name", "nodes")

    def __init__(self, name: str, mode: str, *, marks: str, nodes: str, files: str) -> None:
        self.name = name
        self.mode = mode
        self.marks = marks
        self.nodes = nodes
        self.files = files


# In the order in which `auto` decides.
PLATFORMS = (
    Platform(
        "WSL",
        WSL,
        marks=f'"{DXG}" and "{DXCORE}"',
        nodes=f'"{DXG}"',
        files="the driver store that an adapter names",
    ),
    Platform(
        "Tegra",
        CSV,
        marks=f'"{TEGRA_RELEASE}", or "{TEGRA_FAMILY}" begins with "tegra"; and no NVML, or NVML '
        "lists an integrated GPU",
        nodes='the "dev" entries of the CSV files',
        files="the other entries of the CSV files",
    ),
    Platform(
        "Linux",
        NVML,
        marks=f'"{search_paths.NVML_NAME}"',
        nodes="the GPU's, by its minor number, and the control nodes",
        files="the driver root",
    ),
)
BY_MODE = {platform.mode: platform for platform in PLATFORMS}


class Marks(Record):
    """The marks of a machine, each "" if it is missing.

    *dxcore* is the host path of libdxcore, *kernel* the release of the kernel. *dxg* and *tegra*
    are the parts of a sentence that name the files.
    """

    __slots__ = ("dxcore", "dxg", "kernel", "tegra")

    def __init__(self, *, dxg: str, dxcore: str, kernel: str, tegra: str) -> None:
        self.dxg = dxg
        self.dxcore = dxcore
        self.kernel = kernel
        self.tegra = tegra

    @property
    def wsl(self) -> str:
        """The part of a sentence that names the marks of WSL, "" unless both exist."""
        return f'{self.dxg} and "{self.dxcore}"' if self.dxg and self.dxcore else ""


def marks(root: DriverRoot, dev: DevRoot) -> Marks:
    """Return the marks that the machine below *root* and *dev* has."""
    dxcore = ""
    dxg = f'"{DXG}"' if dev.exists(DXG) else ""
    if dxg:
        for directory in (WSL_LIBRARIES, *search_paths.library_candidates(root)):
            path = root.locate(posixpath.join(directory, DXCORE))
            if path:
                dxcore = root.host_path(path)
                break
    tegra = ""
    family = root.read(TEGRA_FAMILY, _MAX_BYTES) or b""
    if root.locate(TEGRA_RELEASE):
        tegra = f'"{root.host_path(TEGRA_RELEASE)}"'
    elif family.lower().startswith(b"tegra"):
        tegra = f'"{root.host_path(TEGRA_FAMILY)}"'
    kernel = (root.read(KERNEL_RELEASE, _MAX_BYTES) or b"").decode("ascii", "replace").strip()
    return Marks(dxg=dxg, dxcore=dxcore, kernel=kernel, tegra=tegra)


def is_integrated_name(name: str) -> bool:
    """Return whether NVML's *name* of a GPU is that of one that is part of a Tegra."""
    return any(part in name for part in _INTEGRATED)


def is_integrated(gpu: Gpu) -> bool:
    """Return whether *gpu* is part of a Tegra, by the name that NVML reports."""
    return is_integrated_name(gpu.name)


def is_integrated_here(gpu: Gpu) -> bool:
    """Return whether *gpu*, of a machine that is a Tegra, is its integrated GPU."""
    return gpu.bus_id == _INTEGRATED_BUS_ID or (not gpu.bus_id and is_integrated(gpu))


def missing_wsl(machine: Marks) -> tuple[str, str] | None:
    """Return why a WSL has no GPU, and what to do; None if the machine is not a WSL."""
    kernel = machine.kernel.lower()
    if machine.dxg and not machine.dxcore:
        return (
            f'WSL has {machine.dxg}, but no "{DXCORE}" in "{WSL_LIBRARIES}"',
            'run "wsl --update" and "wsl --shutdown" on Windows',
        )
    if "microsoft" not in kernel or machine.dxg:
        return None
    if "wsl2" in kernel:
        return (
            f'WSL 2 has no "{DXG}": Windows has no GPU, or no driver with WSL support',
            "install the NVIDIA driver on Windows",
        )
    return (
        "this is WSL 1, which has no GPUs",
        'run "wsl --set-version DISTRIBUTION 2" on Windows',
    )


def tegra_decision(mode: str, machine: Marks, answer: Answer | None) -> str:
    """Return the sentence that the machine is treated as a Tegra, "" if it is not.

    *answer* is that of NVML, None if there is no NVML that answers.
    """
    if mode == CSV:
        what = machine.tegra and f": there is {machine.tegra}"
        return f"the platform is Tegra, as the mode says{what}"
    if mode != AUTO:
        return ""
    gpus = answer.gpus if answer else ()
    names = [gpu.name for gpu in gpus if is_integrated(gpu)]
    if names:
        others = len(gpus) - len(names)
        beside = f", beside {others} other GPU{'s' if others > 1 else ''}" if others else ""
        return f'the platform is Tegra: NVML lists the GPU "{names[0]}"{beside}'
    if machine.tegra and not gpus:
        return f"the platform is Tegra: there is {machine.tegra}"
    return ""


def nvml_decision(machine: Marks) -> str:
    """Return the sentence that another platform's marks do not count, "" if there are none."""
    names = [name for name, mark in (("WSL", machine.wsl), ("Tegra", machine.tegra)) if mark]
    reasons = []
    if names:
        reasons.append(
            f"the marks of {' and '.join(names)} do not count, because the mode is nvml or no GPU "
            "is an integrated one"
        )
    if machine.dxg and not machine.dxcore:
        reasons.append(f'{machine.dxg} does not count, because there is no "{DXCORE}"')
    return f"the GPUs are those that NVML lists: {'; '.join(reasons)}" if reasons else ""
