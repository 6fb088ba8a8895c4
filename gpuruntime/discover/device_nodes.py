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
from gpuruntime.request.driver_options import MAX_IMEX_CHANNEL
from gpuruntime.system.paths import Root

CONTROL = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
# Without one of these, CUDA finds no device in a container.
REQUIRED = ("nvidia-uvm", "nvidiactl")
CAPS = "/dev/nvidia-caps"
CHANNELS = "/dev/nvidia-caps-imex-channels"
DRI = "/dev/dri"
BY_PATH = "/dev/dri/by-path"
# The nodes of each feature: a path, or the first part of one followed by "*".
FEATURES = {
    model.GDS: ("/dev/nvidia-fs*",),
    model.MOFED: ("/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs*"),
    model.GDRCOPY: ("/dev/gdrdrv",),
    model.NVSWITCH: ("/dev/nvidia-nvswitch*",),
    model.IMEX: (f"{CHANNELS}/channel*",),
    model.CC: ("/dev/sev-guest", "/dev/tdx_guest"),
}
# Created by modules that are not part of the driver; a driver container may lack these nodes.
HOST_FEATURES = (model.GDS, model.MOFED, model.GDRCOPY, model.CC)
_MIG_FEATURES = {model.MIG_CONFIG: "config", model.MIG_MONITOR: "monitor"}
# A management container gets all nodes except those of storage and of the NVLink fabric.
_NOT_MANAGED = ("nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink")
_MANAGED = ((CHANNELS, "channel"), (CAPS, "nvidia-cap"))
_ALL_READ_WRITE = stat.S_IROTH | stat.S_IWOTH
_MAX_MINORS_BYTES = 4 << 20
_NUMBER = re.compile(r"([0-9]+)")
_MAX_MINOR_DIGITS = 9
_MINOR_LINE = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,9})\s*$", re.MULTILINE)


class DevRoot:
    """The device nodes below a dev root. Each directory is opened once and read by descriptor."""

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
        """Return the host's node for the container path *path*, None if it does not exist."""
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
        is_open_to_all = status.st_mode & _ALL_READ_WRITE == _ALL_READ_WRITE
        return Node(
            host_path=posixpath.join(host_path, name),
            container_path=path,
            group=0 if is_open_to_all else status.st_gid,
        )

    def exists(self, path: str) -> bool:
        """Return whether any file exists at the container path *path*."""
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
        nodes = (self.node(f"{directory}/{name}") for name in names)
        return [node for node in nodes if node is not None]

    def link(self, path: str) -> str | None:
        """Return the target of the symlink *path*, verbatim; None if it does not exist."""
        parent, name = posixpath.split(path)
        directory = self._directory(parent)
        if directory is None:
            return None
        try:
            return os.readlink(name, dir_fd=directory[0])
        except OSError:
            return None

    def capabilities(self, proc: str) -> _Capabilities:
        """Return the MIG capabilities that the kernel lists below *proc*, read once."""
        if proc not in self._capabilities:
            self._capabilities[proc] = _Capabilities(proc)
        return self._capabilities[proc]

    def _directory(self, path: str) -> tuple[int, str] | None:
        """Return descriptor and host path of the directory *path*, None if it cannot be opened."""
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

    Raises DiscoveryError if *strict* and one of REQUIRED is missing.
    """
    nodes = []
    for name in CONTROL:
        node = dev.node(f"/dev/{name}")
        if node is not None:
            nodes.append(node)
        elif strict and name in REQUIRED:
            raise DiscoveryError(
                f'no device node "/dev/{name}" below the dev root "{dev.path}"',
                _elsewhere(f"/dev/{name}", dev) or missing_action(f"/dev/{name}", dev),
            )
    return tuple(nodes)


def management_nodes(dev: DevRoot) -> tuple[Node, ...]:
    """Return every node that a management container gets.

    Raises DiscoveryError if there are none.
    """
    nodes = [
        node
        for node in dev.nodes("/dev", "nvidia")
        if not posixpath.basename(node.container_path).startswith(_NOT_MANAGED)
    ]
    for directory, prefix in _MANAGED:
        nodes += dev.nodes(directory, prefix)
    if not nodes:
        raise DiscoveryError(
            f'no NVIDIA device nodes found below the dev root "{dev.path}"',
            _elsewhere("/dev/nvidiactl", dev) or missing_action("/dev/nvidiactl", dev),
        )
    return tuple(nodes)


def feature_nodes(
    dev: DevRoot, host: DevRoot, *, proc: str = "/proc"
) -> dict[str, tuple[Node, ...]]:
    """Return the nodes of each of model.FEATURES, in the order of the numbers in their names.

    The nodes of HOST_FEATURES are taken from *host* where *dev* has none.
    """
    by_feature = {}
    for feature, patterns in FEATURES.items():
        nodes = _matching(dev, patterns)
        if not nodes and feature in HOST_FEATURES:
            nodes = _matching(host, patterns)
        by_feature[feature] = nodes
    by_feature[model.IMEX] = tuple(filter(_is_channel, by_feature[model.IMEX]))
    capabilities = dev.capabilities(proc)
    for feature, name in _MIG_FEATURES.items():
        minor = capabilities.minor(name)
        node = None if minor is None else dev.node(f"{CAPS}/nvidia-cap{minor}")
        by_feature[feature] = () if node is None else (node,)
    return by_feature


def _matching(dev: DevRoot, patterns: Iterable[str]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for pattern in patterns:
        directory, name = posixpath.split(pattern)
        if name.endswith("*"):
            nodes += dev.nodes(directory, name[:-1])
        else:
            node = dev.node(pattern)
            nodes += [] if node is None else [node]
    return tuple(sorted(nodes, key=_with_numbers))


def _is_channel(node: Node) -> bool:
    """Return whether the driver makes a node of the name that *node* has for an IMEX channel."""
    number = node.container_path.rpartition("/channel")[2]
    is_plain = (
        number.isdecimal() and number.isascii() and len(number) <= len(str(MAX_IMEX_CHANNEL))
    )
    return is_plain and str(int(number)) == number and int(number) <= MAX_IMEX_CHANNEL


def _with_numbers(node: Node) -> list[tuple[int, str]]:
    """Return a sort key that puts channel10 after channel9."""
    parts = _NUMBER.split(node.container_path)
    return [(int(part), "") if position % 2 else (0, part) for position, part in enumerate(parts)]


def gpu_nodes(
    gpus: Iterable[Gpu],
    dev: DevRoot,
    *,
    strict: bool = True,
    proc: str = "/proc",
    sys: str = "/sys",
) -> tuple[tuple[GpuNodes, ...], tuple[LeftOutDevice, ...]]:
    """Return *gpus* with their nodes, and the GPUs and MIG devices that are left out.

    A MIG device without capability nodes is left out: with the node of its GPU alone, a container
    would see a GPU that it cannot use. If not *strict*, a GPU without a node is returned with the
    node that it should have; completing the node from the host reports that it is missing.
    """
    capabilities = dev.capabilities(proc)
    usable: list[GpuNodes] = []
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
        usable.append(
            GpuNodes(
                gpu=gpu,
                node=node,
                drm=drm,
                links=_by_path_links(gpu, drm, dev),
                mig=tuple(migs),
            )
        )
    return tuple(usable), tuple(left_out)


def _no_node(path: str, dev: DevRoot) -> str:
    where = "" if dev.path == "/" else f' below the dev root "{dev.path}"'
    return f'no device node "{path}"{where}'


def _elsewhere(path: str, dev: DevRoot) -> str | None:
    """Return the hint to use the host's own nodes, None unless *path* exists there."""
    if dev.path == "/" or not os.path.exists(path):
        return None
    return f'use "--dev-root /", where there is a "{path}"'


def missing_action(path: str, dev: DevRoot) -> str:
    """Return the action to take when the node *path* does not exist below *dev*."""
    host_path = os.path.join(dev.path, path[1:])
    return remedies.missing_node(remedies.LiveHost(), host_path, dev.path)


def _drm_nodes(gpu: Gpu, dev: DevRoot, sys: str) -> tuple[Node, ...]:
    if not gpu.bus_id:
        return ()
    try:
        names = sorted(os.listdir(f"{sys}/bus/pci/devices/{gpu.bus_id}/drm"))
    except OSError:
        return ()
    nodes = (dev.node(f"{DRI}/{name}") for name in names)
    return tuple(node for node in nodes if node is not None)


def _by_path_links(gpu: Gpu, drm: tuple[Node, ...], dev: DevRoot) -> tuple[str, ...]:
    """Return `TARGET::LINK` of the symlinks to *drm* named after the GPU's PCI address."""
    drm_paths = {node.container_path for node in drm}
    links = []
    for kind in ("card", "render") if drm_paths else ():
        link = f"{BY_PATH}/pci-{gpu.bus_id}-{kind}"
        target = dev.link(link)
        if target is not None and posixpath.normpath(posixpath.join(BY_PATH, target)) in drm_paths:
            links.append(f"{target}::{link}")
    return tuple(links)


def _mig_nodes(
    gpu: Gpu, mig: MigDevice, dev: DevRoot, capabilities: _Capabilities
) -> tuple[list[Node], str]:
    """Return the nodes that grant the GPU instance and the compute instance of *mig*, or why not.

    The reason is "" if both nodes are returned.
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
    """The kernel driver's list of the nodes that grant MIG instances, read on first use."""

    def __init__(self, proc: str) -> None:
        self.minors_file = f"{proc}/driver/nvidia-caps/mig-minors"
        self._tree = f"{proc}/driver/nvidia/capabilities"
        self._minors: dict[str, str] | None = None

    def file(self, name: str) -> str:
        """Return the file of the capability *name*, `gpu0/gi1/access`, in the driver's tree.

        The capability `config` does not belong to one GPU.
        """
        gpu, slash, rest = name.partition("/")
        return f"{self._tree}/{gpu}/mig/{rest}" if slash else f"{self._tree}/mig/{name}"

    def minor(self, name: str) -> int | None:
        """Return the minor of the node that grants *name*; None if the driver lists none."""
        if self._minors is None:
            self._minors = _parse_minors(_read(self.minors_file))
        minor = self._minors.get(name)
        if minor is None:
            match = _MINOR_LINE.search(_read(self.file(name)))
            return int(match[1]) if match else None
        return int(minor)


def _parse_minors(text: str) -> dict[str, str]:
    """Return capability → minor of lines such as `gpu0/gi1/access 12`; skip others."""
    # Thousands of lines, of which most hosts need two: a pattern would take three times as long.
    rows = [line.partition(" ") for line in text.split("\n")]
    return {name: number for name, _, number in rows if _is_minor(number)}


def _is_minor(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= _MAX_MINOR_DIGITS


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read(_MAX_MINORS_BYTES)
    except OSError:
        return ""
