# SPDX-License-Identifier: Apache-2.0
"""The inventory as plain values: GPUs, MIG devices, driver files, device nodes.

A host path and a container path are different things even if they are equal; every field name says
which of the two it has.
"""

from __future__ import annotations

from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Features with device nodes other than those of the GPUs; each is requested separately.
GDS, MOFED, GDRCOPY, NVSWITCH = "gds", "mofed", "gdrcopy", "nvswitch"
IMEX, MIG_CONFIG, MIG_MONITOR = "imex", "mig-config", "mig-monitor"
# Confidential computing: the nodes by which a guest proves what runs in it.
CC = "cc"
FEATURES = (GDS, MOFED, GDRCOPY, NVSWITCH, IMEX, CC, MIG_CONFIG, MIG_MONITOR)
# The nodes of features that have nodes of several kinds: the beginnings of their paths.
KINDS_OF_NODES = {
    MOFED: ("/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs"),
    NVSWITCH: ("/dev/nvidia-nvswitchctl",),
}
# How GPUs are discovered on a platform: by NVML and device nodes, by Windows' adapters, by the CSV
# files of a Tegra.
NVML, WSL, CSV = "nvml", "wsl", "csv"
# The program that users expect in a container.
SMI = "nvidia-smi"
# The capability of files that a container gets only if it requests every CSV file.
ALL_CSV = "csv-mounts"


class MigDevice(Record):
    """A compute instance of a GPU; *index* is its NVML index among those of its GPU."""

    __slots__ = ("compute_instance", "gpu_instance", "index", "uuid")

    def __init__(self, *, index: int, uuid: str, gpu_instance: int, compute_instance: int) -> None:
        self.index = index
        self.uuid = uuid
        self.gpu_instance = gpu_instance
        self.compute_instance = compute_instance


class Gpu(Record):
    """A full GPU.

    *minor* is that of its node /dev/nvidia<minor>; *index* is its NVML index. *bus_id* is the PCI
    address in the form of sysfs, `0000:1a:00.0`. With *mig_enabled* the GPU is used through its
    *mig_devices* only. *architecture* is its compute capability, `8.0`; *brand* has the spelling
    of requirements, `tesla`. Each of these is "" if NVML does not report it. A *coherent* GPU
    shares page tables with the processor, as on Grace; its memory is the NUMA node *memory_node*,
    -1 if it is none.
    """

    __slots__ = (
        *("architecture", "brand", "bus_id", "coherent", "index", "memory_node", "mig_devices"),
        *("mig_enabled", "minor", "name", "uuid"),
    )

    def __init__(  # noqa: PLR0913 (fields, given by name)
        self,
        *,
        index: int,
        uuid: str,
        minor: int,
        name: str,
        bus_id: str = "",
        mig_enabled: bool = False,
        mig_devices: tuple[MigDevice, ...] = (),
        architecture: str = "",
        brand: str = "",
        coherent: bool = False,
        memory_node: int = -1,
    ) -> None:
        self.index = index
        self.uuid = uuid
        self.minor = minor
        self.name = name
        self.bus_id = bus_id
        self.mig_enabled = mig_enabled
        self.mig_devices = mig_devices
        self.architecture = architecture
        self.brand = brand
        self.coherent = coherent
        self.memory_node = memory_node


class Node(Record):
    """A device node. *group* is the group that may use it if not every user may, else 0."""

    __slots__ = ("container_path", "group", "host_path")

    def __init__(self, *, host_path: str, container_path: str, group: int = 0) -> None:
        self.host_path = host_path
        self.container_path = container_path
        self.group = group


def missing_nodes(feature: str, nodes: tuple[Node, ...]) -> str:
    """Return a sentence about the kinds of nodes that *feature* lacks, "" unless it has others."""
    missing = [
        f'"{path}"'
        for path in KINDS_OF_NODES.get(feature, ())
        if not any(node.container_path.startswith(path) for node in nodes)
    ]
    if not nodes or not missing:
        return ""
    return f"{feature} is incomplete: no device node {' or '.join(missing)}"


class GpuNodes(Record):
    """A GPU and its nodes: its own, those of DRM, and the two nodes of each MIG device.

    *links* are `TARGET::LINK`, the by-path links to DRM nodes. *others* are the further nodes that
    a GPU needs on a platform without control nodes.
    """

    __slots__ = ("drm", "gpu", "links", "mig", "node", "others")

    def __init__(
        self,
        *,
        gpu: Gpu,
        node: Node,
        drm: tuple[Node, ...] = (),
        links: tuple[str, ...] = (),
        mig: tuple[tuple[MigDevice, Node, Node], ...] = (),
        others: tuple[Node, ...] = (),
    ) -> None:
        self.gpu = gpu
        self.node = node
        self.drm = drm
        self.links = links
        self.mig = mig
        self.others = others


class LeftOutDevice(Record):
    """A GPU or MIG device that is not available to containers, and the reason.

    *name* is its index, `1` or `0:1`, or "" if NVML does not list it. *uuid* and *bus_id* are ""
    if they are unknown. *hint* is the action for the operator.
    """

    __slots__ = ("bus_id", "hint", "name", "reason", "uuid")

    def __init__(
        self, *, reason: str, hint: str, name: str = "", uuid: str = "", bus_id: str = ""
    ) -> None:
        self.name = name
        self.uuid = uuid
        self.bus_id = bus_id
        self.reason = reason
        self.hint = hint

    @property
    def title(self) -> str:
        """The name of the device in a sentence."""
        kind = "MIG device" if ":" in self.name else "GPU"
        return f"{kind} {self.name or self.bus_id}"

    def __str__(self) -> str:
        return f"{self.title} is left out: {self.reason}"


class Library(Record):
    """A driver library.

    *capability* is the driver capability that it belongs to, "" if to all. *needed* are the
    SONAMEs of its dependencies. *dev_link* is the name of its `.so` link, or ""; *links* are
    further links, `TARGET::LINK`.
    """

    __slots__ = (
        *("abi", "capability", "container_path", "dev_link", "host_path"),
        *("links", "needed", "soname"),
    )

    def __init__(
        self,
        *,
        host_path: str,
        container_path: str,
        soname: str,
        abi: str,
        capability: str = "",
        needed: tuple[str, ...] = (),
        dev_link: str = "",
        links: tuple[str, ...] = (),
    ) -> None:
        self.host_path = host_path
        self.container_path = container_path
        self.soname = soname
        self.abi = abi
        self.capability = capability
        self.needed = needed
        self.dev_link = dev_link
        self.links = links


class File(Record):
    """Another file or directory of the driver.

    *kind* is "binary", "config", "firmware", "xorg" (a module), or "ipc" (a socket or a directory
    of sockets, to which the container must be able to write). *capability* and *links* are the
    same as those of a Library.
    """

    __slots__ = ("capability", "container_path", "host_path", "kind", "links")

    def __init__(
        self,
        *,
        kind: str,
        host_path: str,
        container_path: str,
        capability: str = "",
        links: tuple[str, ...] = (),
    ) -> None:
        self.kind = kind
        self.host_path = host_path
        self.container_path = container_path
        self.capability = capability
        self.links = links


class Driver(Record):
    """The user space of one driver version below a driver root.

    *problems* are sentences about missing and omitted files, with the reasons. *platform* is NVML,
    WSL or CSV; the *version* is "" where only NVML would report it, and is not asked.
    """

    __slots__ = ("files", "libraries", "platform", "problems", "version")

    def __init__(
        self,
        *,
        version: str,
        libraries: tuple[Library, ...],
        files: tuple[File, ...],
        problems: tuple[str, ...] = (),
        platform: str = NVML,
    ) -> None:
        self.version = version
        self.libraries = libraries
        self.files = files
        self.problems = problems
        self.platform = platform

    def has_program(self, name: str) -> bool:
        """Return whether the program *name* is one of the files."""
        return any(file.container_path.endswith(f"/{name}") for file in self.files)

    @property
    def missing_program(self) -> str:
        """A sentence if there is no nvidia-smi, else "".

        It is also "" if a problem is about it, and on a Tegra, which need not have it.
        """
        is_reported = any(SMI in problem for problem in self.problems)
        if self.platform != NVML or self.has_program(SMI) or is_reported:
            return ""
        return f'no "{SMI}" on PATH or beside the driver\'s libraries: containers have none'


class Inventory(Record):
    """One machine: its driver, its GPUs with their nodes, its control nodes.

    *management_nodes* are all nodes of the driver, for containers that manage the GPUs. *features*
    has the nodes of each of FEATURES, possibly none; *gds_files* are the files for GDS.
    *cuda_version* is the newest CUDA version that the driver runs, `12.4`, or "" if NVML does
    not report it. *left_out* are GPUs and MIG devices that are not among *gpus*. *problems* are
    sentences about faults, including those that are the reason for a device in *left_out*.
    *decision* is a sentence: by which marks the platform was chosen, "" for the usual one.
    """

    __slots__ = (
        *("control_nodes", "cuda_version", "decision", "driver", "features", "gds_files", "gpus"),
        *("left_out", "management_nodes", "problems"),
    )

    def __init__(  # noqa: PLR0913 (fields, given by name)
        self,
        *,
        driver: Driver,
        gpus: tuple[GpuNodes, ...],
        control_nodes: tuple[Node, ...],
        management_nodes: tuple[Node, ...] = (),
        features: Mapping[str, tuple[Node, ...]] | None = None,
        gds_files: tuple[File, ...] = (),
        cuda_version: str = "",
        problems: tuple[str, ...] = (),
        left_out: tuple[LeftOutDevice, ...] = (),
        decision: str = "",
    ) -> None:
        self.driver = driver
        self.gpus = gpus
        self.control_nodes = control_nodes
        self.management_nodes = management_nodes
        self.features = {**dict.fromkeys(FEATURES, ()), **(features or {})}
        self.gds_files = gds_files
        self.cuda_version = cuda_version
        self.problems = problems
        self.left_out = left_out
        self.decision = decision
