# SPDX-License-Identifier: Apache-2.0
"""The driver's device nodes below a dev root: which are required, and which exist.

Only a character device itself counts, never a symlink to one.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Iterable

from gpuruntime import model, remedies
from gpuruntime.errors import DiscoveryError
from gpuruntime.model import Gpu, GpuNodes, LeftOutDevice, MigDevice, Node
from gpuruntime.system.paths import Root

CONTROL = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
# A container without one of these finds no device, whatever else it gets.
REQUIRED = ("nvidia-uvm", "nvidiactl")
CAPS = "/dev/nvidia-caps"
CHANNELS = "/dev/nvidia-caps-imex-channels"
DRI = "/dev/dri"
BY_PATH = "/dev/dri/by-path"
# Where the nodes of each feature are: a name, or the beginning of names.
FEATURES = {
    model.GDS: ("/dev/nvidia-fs*",),
    model.MOFED: ("/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs*"),
    model.GDRCOPY: ("/dev/gdrdrv",),
    model.NVSWITCH: ("/dev/nvidia-nvswitch*",),
    model.IMEX: (f"{CHANNELS}/channel*",),
}
# Made by modules that are not the driver's, which a driver container need not have.
HOST_FEATURES = (model.GDS, model.MOFED, model.GDRCOPY)
_MIG_FEATURES = {model.MIG_CONFIG: "config", model.MIG_MONITOR: "monitor"}
# Who looks after GPUs gets all but the nodes of storage and of the NVLink fabric.
_NOT_MANAGED = ("nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink")
_MANAGED = ((CHANNELS, "channel"), (CAPS, "nvidia-cap"))
_ALL_READ_WRITE = stat.S_IROTH | stat.S_IWOTH
_MAX_MINORS_BYTES = 4 << 20
_MINORS_LINE = re.compile(r"^(\S+) ([0-9]{1,9})$", re.MULTILINE)
_NUMBER = re.compile(r"([0-9]+)")
_MINOR_LINE = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,9})\s*$", re.MULTILINE)


class DevRoot:
    """The device nodes below a dev root; each directory is opened once, and read by descriptor."""

    def __init__(self, path: str) -> None:
        """Open the dev root *path*; raise DiscoveryError."""
        self.path = os.path.realpath(path)
        try:
            self._root = Root(self.path)
        except OSError as error:
            raise DiscoveryError(
                f'cannot open the dev root "{path}": {error.strerror}',
                'name the directory whose "dev" holds the nodes with "--dev-root"',
            ) from error
        self._directories: dict[str, tuple[int, str] | None] = {}
        self._capabilities: dict[str, _Capabilities] = {}

    def close(self) -> None:
        """Close all descriptors."""
        for directory in self._directories.values():
            if directory is not None:
                os.close(directory[0])
        self._directories.clear()
        self._root.close()

    def node(self, path: str) -> Node | None:
        """Return the node that the container path *path* is on the host, None if there is none."""
        parent, name = posixpath.split(path)
        directory = self._directory(parent)
        if directory is None:
            return None
        fd, host_path = directory
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return None
        if not stat.S_ISCHR(status.st_mode):
            return None
        is_everybodys = status.st_mode & _ALL_READ_WRITE == _ALL_READ_WRITE
        return Node(
            host_path=posixpath.join(host_path, name),
            container_path=path,
            group=0 if is_everybodys else status.st_gid,
        )

    def exists(self, path: str) -> bool:
        """Return whether there is a node, or anything else, at the container path *path*."""
        parent, name = posixpath.split(path)
        directory = self._directory(parent)
        if directory is None:
            return False
        try:
            os.stat(name, dir_fd=directory[0], follow_symlinks=False)
        except OSError:
            return False
        return True

    def nodes(self, directory: str, prefix: str) -> list[Node]:
        """Return the nodes in *directory* whose names begin with *prefix*, sorted."""
        opened = self._directory(directory)
        if opened is None:
            return []
        names = sorted(name for name in os.listdir(opened[0]) if name.startswith(prefix))
        found = (self.node(f"{directory}/{name}") for name in names)
        return [node for node in found if node is not None]

    def link(self, path: str) -> str | None:
        """Return the target of the link *path*, verbatim; None if there is none."""
        parent, name = posixpath.split(path)
        directory = self._directory(parent)
        if directory is None:
            return None
        try:
            return os.readlink(name, dir_fd=directory[0])
        except OSError:
            return None

    def capabilities(self, proc: str) -> _Capabilities:
        """Return what the kernel says below *proc* of the nodes of MIG, read once."""
        if proc not in self._capabilities:
            self._capabilities[proc] = _Capabilities(proc)
        return self._capabilities[proc]

    def _directory(self, path: str) -> tuple[int, str] | None:
        """Return the descriptor and the host path of the directory *path*, None if not there."""
        if path not in self._directories:
            try:
                fd = self._root.open_directory(path)
            except OSError:
                self._directories[path] = None
            else:
                self._directories[path] = fd, os.readlink(f"/proc/self/fd/{fd}")
        return self._directories[path]


def control_nodes(dev: DevRoot, *, strict: bool = True) -> tuple[Node, ...]:
    """Return the control nodes that exist, sorted.

    Raises DiscoveryError if one is missing without which CUDA cannot work, if *strict*.
    """
    found = []
    for name in CONTROL:
        node = dev.node(f"/dev/{name}")
        if node is not None:
            found.append(node)
        elif strict and name in REQUIRED:
            raise DiscoveryError(
                f'no device node "/dev/{name}" below the dev root "{dev.path}"',
                _elsewhere(f"/dev/{name}", dev) or missing_action(f"/dev/{name}", dev),
            )
    return tuple(found)


def management_nodes(dev: DevRoot) -> tuple[Node, ...]:
    """Return every node of the driver, for who looks after the GPUs; raise DiscoveryError."""
    found = [
        node
        for node in dev.nodes("/dev", "nvidia")
        if not posixpath.basename(node.container_path).startswith(_NOT_MANAGED)
    ]
    for directory, prefix in _MANAGED:
        found += dev.nodes(directory, prefix)
    if not found:
        raise DiscoveryError(
            f'no NVIDIA device nodes found below the dev root "{dev.path}"',
            _elsewhere("/dev/nvidiactl", dev) or missing_action("/dev/nvidiactl", dev),
        )
    return tuple(found)


def feature_nodes(
    dev: DevRoot, host: DevRoot, *, proc: str = "/proc"
) -> dict[str, tuple[Node, ...]]:
    """Return the nodes of each of model.FEATURES, those with numbers in their order.

    For features of other modules than the driver's, those of *host* where *dev* has none.
    """
    found = {}
    for feature, patterns in FEATURES.items():
        nodes = _matching(dev, patterns)
        if not nodes and feature in HOST_FEATURES:
            nodes = _matching(host, patterns)
        found[feature] = nodes
    capabilities = dev.capabilities(proc)
    for feature, name in _MIG_FEATURES.items():
        minor = capabilities.minor(name)
        node = None if minor is None else dev.node(f"{CAPS}/nvidia-cap{minor}")
        found[feature] = () if node is None else (node,)
    return found


def _matching(dev: DevRoot, patterns: Iterable[str]) -> tuple[Node, ...]:
    found: list[Node] = []
    for pattern in patterns:
        directory, name = posixpath.split(pattern)
        if name.endswith("*"):
            found += dev.nodes(directory, name[:-1])
        else:
            node = dev.node(pattern)
            found += [] if node is None else [node]
    return tuple(sorted(found, key=_with_numbers))


def _with_numbers(node: Node) -> list[tuple[int, str]]:
    """Return a key that sorts channel10 behind channel9."""
    parts = _NUMBER.split(node.container_path)
    return [(int(part), "") if at % 2 else (0, part) for at, part in enumerate(parts)]


def gpu_nodes(
    gpus: Iterable[Gpu],
    dev: DevRoot,
    *,
    strict: bool = True,
    proc: str = "/proc",
    sys: str = "/sys",
) -> tuple[tuple[GpuNodes, ...], tuple[LeftOutDevice, ...]]:
    """Return *gpus* with their nodes, and those and the MIG devices that are left out.

    That is also a MIG device without capability nodes: with that of its GPU alone, a container
    would see a GPU that it cannot use. If not *strict*, a GPU without a node has the one that it
    is to have: whoever completes it from the host finds that it is missing.
    """
    capabilities = dev.capabilities(proc)
    found: list[GpuNodes] = []
    left_out: list[LeftOutDevice] = []
    for gpu in gpus:
        path = f"/dev/nvidia{gpu.minor}"
        node = dev.node(path)
        if node is None and not strict:
            node = Node(host_path=os.path.join(dev.path, path[1:]), container_path=path)
        if node is None:
            left_out.append(
                LeftOutDevice(
                    name=str(gpu.index),
                    uuid=gpu.uuid,
                    bus_id=gpu.bus_id,
                    reason=_no_node(path, dev),
                    hint=_elsewhere(path, dev) or missing_action(path, dev),
                )
            )
            continue
        drm = _drm_nodes(gpu, dev, sys)
        migs: list[tuple[MigDevice, Node, Node]] = []
        for mig in gpu.mig_devices:
            granting, problem = _mig_nodes(gpu, mig, dev, capabilities)
            if problem:
                left_out.append(
                    LeftOutDevice(
                        name=f"{gpu.index}:{mig.index}",
                        uuid=mig.uuid,
                        reason=problem,
                        hint=remedies.create_nodes(),
                    )
                )
            else:
                migs.append((mig, granting[0], granting[1]))
        found.append(
            GpuNodes(
                gpu=gpu,
                node=node,
                drm=drm,
                links=_by_path_links(gpu, drm, dev),
                mig=tuple(migs),
            )
        )
    return tuple(found), tuple(left_out)


def _no_node(path: str, dev: DevRoot) -> str:
    where = "" if dev.path == "/" else f' below the dev root "{dev.path}"'
    return f'no device node "{path}"{where}'


def _elsewhere(path: str, dev: DevRoot) -> str | None:
    """Return the hint to look at the host's own nodes, if that is where *path* is."""
    if dev.path == "/" or not os.path.exists(path):
        return None
    return f'use "--dev-root /", where there is a "{path}"'


def missing_action(path: str, dev: DevRoot) -> str:
    """Return the action where the node *path* does not exist below *dev*."""
    host_path = os.path.join(dev.path, path[1:])
    return remedies.missing_node(remedies.LiveHost(), host_path, dev.path)


def _drm_nodes(gpu: Gpu, dev: DevRoot, sys: str) -> tuple[Node, ...]:
    if not gpu.bus_id:
        return ()
    try:
        names = sorted(os.listdir(f"{sys}/bus/pci/devices/{gpu.bus_id}/drm"))
    except OSError:
        return ()
    found = (dev.node(f"{DRI}/{name}") for name in names)
    return tuple(node for node in found if node is not None)


def _by_path_links(gpu: Gpu, drm: tuple[Node, ...], dev: DevRoot) -> tuple[str, ...]:
    """Return `TARGET::LINK` of the links to *drm* that are named after the GPU's bus id."""
    there = {node.container_path for node in drm}
    found = []
    for kind in ("card", "render") if there else ():
        link = f"{BY_PATH}/pci-{gpu.bus_id}-{kind}"
        target = dev.link(link)
        if target is not None and posixpath.normpath(posixpath.join(BY_PATH, target)) in there:
            found.append(f"{target}::{link}")
    return tuple(found)


def _mig_nodes(
    gpu: Gpu, mig: MigDevice, dev: DevRoot, capabilities: _Capabilities
) -> tuple[list[Node], str]:
    """Return the nodes that grant the GPU instance and the compute instance of *mig*, or why not.

    The second is "" if the first has both.
    """
    instance = f"gpu{gpu.minor}/gi{mig.gpu_instance}"
    nodes = []
    for name in (f"{instance}/access", f"{instance}/ci{mig.compute_instance}/access"):
        minor = capabilities.minor(name)
        file = capabilities.file(name)
        if minor is None:
            why = f'neither "{capabilities.minors_file}" nor "{file}" tells the minor of {name}'
            return [], why
        node = dev.node(f"{CAPS}/nvidia-cap{minor}")
        if node is None:
            path = f"{CAPS}/nvidia-cap{minor}"
            return [], f"{_no_node(path, dev)}; {missing_action(path, dev)}"
        nodes.append(node)
    return nodes, ""


class _Capabilities:
    """What the kernel driver tells of the nodes that grant MIG instances; read when asked."""

    def __init__(self, proc: str) -> None:
        self.minors_file = f"{proc}/driver/nvidia-caps/mig-minors"
        self._tree = f"{proc}/driver/nvidia/capabilities"
        self._minors: dict[str, str] | None = None

    def file(self, name: str) -> str:
        """Return the file of the capability *name*, `gpu0/gi1/access`, in the driver's tree.

        Or of `config`, which is not of one GPU.
        """
        gpu, slash, rest = name.partition("/")
        return f"{self._tree}/{gpu}/mig/{rest}" if slash else f"{self._tree}/mig/{name}"

    def minor(self, name: str) -> int | None:
        """Return the minor of the node that grants *name*; None if the driver names none."""
        if self._minors is None:
            self._minors = _parse_minors(_read(self.minors_file))
        minor = self._minors.get(name)
        if minor is None:
            found = _MINOR_LINE.search(_read(self.file(name)))
            return int(found[1]) if found else None
        return int(minor)


def _parse_minors(text: str) -> dict[str, str]:
    """Return capability → minor of the lines `gpu0/gi1/access 12`; others are skipped."""
    return dict(_MINORS_LINE.findall(text))


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read(_MAX_MINORS_BYTES)
    except OSError:
        return ""
