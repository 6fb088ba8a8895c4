# SPDX-License-Identifier: Apache-2.0
"""The inventory of a Tegra, such as a Jetson: the nodes, files and links that CSV files list.

The integrated GPU has no nodes of its own that NVML would name. A discrete GPU beside it has.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re

from gpuruntime.discover import csv_files, device_nodes, platforms
from gpuruntime.discover.root import DriverRoot, is_clean_host_path, normal
from gpuruntime.errors import DiscoveryError
from gpuruntime.formats import ldcache_merge
from gpuruntime.model import ALL_CSV, CSV, Driver, File, Gpu, GpuNodes, Inventory, Library, Node
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpuruntime.discover.device_nodes import DevRoot
    from gpuruntime.discover.nvml import Answer

_MAX_LINKS = 40
_MAX_MATCHES = 4096
_SPECIAL = re.compile(r"[*?\[]")
_GPU_NODE = re.compile(r"/dev/nvidia[0-9]+\Z")
# Beside a discrete GPU, the integrated GPU has the last of these nodes in place of the first.
_NODE_OF_DISCRETE, _NODE_OF_INTEGRATED = "/dev/nvidia1", "/dev/nvidia2"
_TEGRA = "Tegra"


class CsvOptions(Record):
    """Which CSV files are read and how.

    *files*, host paths, replace those in *directory*. Symlink entries that match one of
    *ignore_patterns* are left out. Libraries without a directory are in *library_search_path*.
    *single_device*: the GPUs are one device, even if NVML lists several.
    """

    __slots__ = ("directory", "files", "ignore_patterns", "library_search_path", "single_device")

    def __init__(
        self,
        *,
        files: Sequence[str] = (),
        directory: str = csv_files.DIRECTORY,
        ignore_patterns: Sequence[str] = (),
        library_search_path: Sequence[str] = (),
        single_device: bool = False,
    ) -> None:
        self.files = tuple(files)
        self.directory = directory
        self.ignore_patterns = tuple(ignore_patterns)
        self.library_search_path = tuple(library_search_path)
        self.single_device = single_device


def discover(
    root: DriverRoot,
    dev: DevRoot,
    options: CsvOptions,
    *,
    answer: Answer | None,
    decision: str,
    problems: Sequence[str] = (),
) -> Inventory:
    """Return the inventory of the Tegra below *root* and *dev*.

    *answer* is that of NVML, None without an NVML. *decision* and *problems* are for the
    inventory. Raises DiscoveryError if no CSV file can be used, or no device node exists.
    """
    sentences = csv_files.Sentences()
    entries = csv_files.read(
        root, csv_files.paths(root, options.directory, options.files), sentences
    )
    nodes = _nodes(root, dev, entries, sentences)
    if not nodes:
        raise DiscoveryError(
            f'no device node of the CSV files exists below the dev root "{dev.path}"'
            + "".join(f"; {text}" for text in sentences.all()[:4]),
            "load the kernel modules of the GPU, or correct the dev entries",
        )
    mounts = _Mounts(root, options, sentences)
    # Directories first: what is mounted in one has no symlinks of its own.
    for entry in sorted(entries, key=lambda entry: entry.kind != csv_files.DIRECTORY_TREE):
        if entry.kind != csv_files.DEVICE:
            mounts.add(entry)
    mounts.add_release()
    gpus, problem = _gpus(answer, nodes, dev, options)
    return Inventory(
        driver=Driver(
            version=(answer.driver_version or "") if answer else "",
            libraries=tuple(mounts.libraries[path] for path in sorted(mounts.libraries)),
            files=tuple(mounts.files[path] for path in sorted(mounts.files)),
            problems=sentences.all(),
            platform=CSV,
        ),
        gpus=gpus,
        control_nodes=(),
        cuda_version=answer.cuda_version if answer else "",
        problems=(*problems, *([problem] if problem else [])),
        decision=decision,
    )


def inputs(
    root: DriverRoot, dev: DevRoot, options: CsvOptions
) -> tuple[list[str], list[str], list[str]]:
    """Return what the inventory depends on: CSV files, directories of entries, nodes; host paths.

    The directories and nodes are none if no CSV file can be used.
    """
    listed = csv_files.paths(root, options.directory, options.files)
    files = [root.host_path(options.directory), *(path for path, _ in listed)]
    try:
        entries = csv_files.read(root, listed, csv_files.Sentences())
    except DiscoveryError:
        return files, [], []
    directories = {
        root.host_path(posixpath.dirname(entry.path) or "/")
        for entry in entries
        if entry.kind != csv_files.DEVICE and not _SPECIAL.search(posixpath.dirname(entry.path))
    }
    prefix = "" if dev.path == "/" else dev.path
    nodes = [
        f"{prefix}{normal(entry.path)}"
        for entry in entries
        if entry.kind == csv_files.DEVICE and entry.is_base and not _SPECIAL.search(entry.path)
    ]
    return files, sorted(directories), list(dict.fromkeys(nodes))


def _nodes(
    root: DriverRoot,
    dev: DevRoot,
    entries: Iterable[csv_files.Entry],
    sentences: csv_files.Sentences,
) -> list[Node]:
    """Return the nodes of the dev *entries* that every container gets, each once."""
    tree = root if root.path == dev.path else DriverRoot(dev.path)
    nodes: dict[str, Node] = {}
    for entry in entries:
        if entry.kind != csv_files.DEVICE or not entry.is_base:
            continue
        try:
            paths = _matching(tree, entry.path)
        except DiscoveryError as error:
            sentences.add(f"{entry.where}: {error.message}")
            continue
        existing = [node for path in paths if (node := dev.node(path))]
        if not existing:
            sentences.add(f'{entry.where}: no device node "{entry.path}"')
        nodes.update((node.container_path, node) for node in existing)
    return list(nodes.values())


def _gpus(
    answer: Answer | None, nodes: list[Node], dev: DevRoot, options: CsvOptions
) -> tuple[tuple[GpuNodes, ...], str]:
    """Return the GPUs with their nodes, and a sentence if NVML's list is not usable."""
    listed = list(answer.gpus) if answer else []
    name = next((gpu.name for gpu in listed if platforms.is_integrated(gpu)), _TEGRA)
    architecture = listed[0].architecture if len(listed) == 1 else ""
    one = _as_one(Gpu(index=0, uuid="", minor=0, name=name, architecture=architecture), nodes)
    if len(listed) <= 1 or options.single_device:
        return (one,), ""
    try:
        return tuple(_several(listed, nodes, dev)), ""
    except DiscoveryError as error:
        return (one,), f"all GPUs are one device: {error.message}"


def _as_one(gpu: Gpu, nodes: Sequence[Node]) -> GpuNodes:
    return GpuNodes(gpu=gpu, node=nodes[0], others=tuple(nodes[1:]))


def _several(gpus: Sequence[Gpu], nodes: Sequence[Node], dev: DevRoot) -> Iterable[GpuNodes]:
    """Yield the integrated GPU, which NVML must list first, and the discrete one.

    Raises DiscoveryError for any other list.
    """
    for gpu in gpus:
        if platforms.is_integrated_here(gpu) != (gpu.index == 0) or gpu.index > 1:
            kind = "integrated" if platforms.is_integrated_here(gpu) else "discrete"
            raise DiscoveryError(f"GPU {gpu.index}, {gpu.name}, is {kind}")
        if gpu.mig_enabled:
            raise DiscoveryError(f"GPU {gpu.index}, {gpu.name}, is in MIG mode")
        if gpu.index == 0:
            own = [node for node in nodes if node.container_path != _NODE_OF_DISCRETE]
            node = dev.node(_NODE_OF_INTEGRATED)
            if node is not None and node not in own:
                own.append(node)
            if not own:
                raise DiscoveryError(f"GPU 0, {gpu.name}, has no device node")
            yield _as_one(gpu, own)
            continue
        (discrete,), _ = device_nodes.gpu_nodes([gpu], dev, strict=False)
        control = device_nodes.control_nodes(dev, strict=False)
        others = {node.container_path: node for node in control}
        for node in nodes:
            if not _GPU_NODE.match(node.container_path):
                others.setdefault(node.container_path, node)
        yield GpuNodes(
            gpu=gpu,
            node=discrete.node,
            drm=discrete.drm,
            links=discrete.links,
            others=tuple(others.values()),
        )


class _Mounts:
    """The libraries and files of entries, by container path."""

    def __init__(
        self, root: DriverRoot, options: CsvOptions, sentences: csv_files.Sentences
    ) -> None:
        self._root = root
        self._options = options
        self._sentences = sentences
        self.libraries: dict[str, Library] = {}
        self.files: dict[str, File] = {}
        # Container path of each mounted directory → its capability.
        self._directories: dict[str, str] = {}

    def add(self, entry: csv_files.Entry) -> None:
        """Add what *entry* lists, or a sentence with the reason why not."""
        if entry.kind == csv_files.SYMLINK and self._is_ignored(entry.path):
            return
        add: Callable[[DriverRoot, str, str], None] = {
            csv_files.DIRECTORY_TREE: self._directory,
            csv_files.LIBRARY: self._linked,
            csv_files.SYMLINK: self._linked,
        }[entry.kind]
        capability = "" if entry.is_base else ALL_CSV
        try:
            places = self._places(entry)
            if not places:
                self._sentences.add(f'{entry.where}: "{entry.path}" does not exist')
            for base, path in places:
                add(base, path, capability)
        except DiscoveryError as error:
            self._sentences.add(f"{entry.where}: {error.message}")

    def add_release(self) -> None:
        """Add the file that names the release of the Tegra's software, if it exists."""
        if self._root.locate(platforms.TEGRA_RELEASE):
            self._linked(self._root, platforms.TEGRA_RELEASE, "")

    def _is_ignored(self, path: str) -> bool:
        return any(
            fnmatch.fnmatchcase(posixpath.basename(path), pattern[len("**/") :])
            if pattern.startswith("**/")
            else fnmatch.fnmatchcase(path, pattern)
            for pattern in self._options.ignore_patterns
        )

    def _places(self, entry: csv_files.Entry) -> list[tuple[DriverRoot, str]]:
        """Return the places that the path or pattern of *entry* matches."""
        if entry.path.startswith("/"):
            return [(self._root, path) for path in _matching(self._root, entry.path)]
        for directory in self._options.library_search_path:
            base, path = self._root.around(directory)
            matches = _matching(base, posixpath.join(path, entry.path))
            if matches:
                return [(base, match) for match in matches]
        return [(self._root, path) for path in _matching(self._root, f"/{entry.path}")]

    def _directory(self, root: DriverRoot, path: str, capability: str) -> None:
        if path == "/":
            raise DiscoveryError("the root directory cannot be mounted into a container")
        real = root.trusted_directory(path)
        self._file(root, path, real, (), capability)
        self._directories[path] = min(capability, self._directories.get(path, capability))

    def _linked(self, root: DriverRoot, path: str, capability: str) -> None:
        """Add the file or directory that *path* leads to, and each symlink on the way."""
        end, chain = _chain(root, path)
        links = [
            link for link in chain if not self._is_mounted(link.partition("::")[2], capability)
        ]
        if root.directory(end) is not None:
            if not chain:
                raise DiscoveryError(f'"{root.host_path(path)}" is a directory')
            self._file(root, end, root.trusted_directory(end), links, capability)
            return
        if ".so" in posixpath.basename(end):
            real, elf = root.library(end)
            if elf.abi in ldcache_merge.ABI_FLAGS:
                self._library(root, real, elf.soname or "", elf.abi, links, capability)
                return
        located = root.file(end)
        if located is None:
            raise DiscoveryError(f'"{root.host_path(end)}" does not exist')
        self._file(root, located, located, links, capability)

    def _library(
        self,
        root: DriverRoot,
        real: str,
        soname: str,
        abi: str,
        links: Sequence[str],
        capability: str,
    ) -> None:
        directory, name = posixpath.split(real)
        if not soname or root.locate(f"{directory}/{soname}") not in (real, None):
            # Another file has that name: the loader finds this one by its own.
            soname = name
        plain = soname.partition(".so")[0] + ".so"
        has_plain = plain != soname and root.is_link(f"{directory}/{plain}")
        if self._is_mounted(directory, capability):
            # It cannot be written to in a container: its symlinks are those that it has.
            if root.link_target(f"{directory}/{soname}") != name:
                soname = name
            has_plain = root.link_target(f"{directory}/{plain}") == soname
        previous = self.libraries.get(real)
        self.libraries[real] = Library(
            host_path=root.host_path(real),
            container_path=real,
            soname=soname,
            abi=abi,
            capability=_wider(previous, capability),
            dev_link=plain if has_plain else "",
            links=_joined(previous, links),
        )

    def _is_mounted(self, path: str, capability: str) -> bool:
        """Return whether *path* is a mounted directory of containers with *capability*, or in one.

        A container with an entry of any capability has the directories without one.
        """
        while path not in ("", "/"):
            if self._directories.get(path) in ("", capability):
                return True
            path = posixpath.dirname(path)
        return False

    def _file(
        self, root: DriverRoot, path: str, real: str, links: Sequence[str], capability: str
    ) -> None:
        if not is_clean_host_path(path) or not is_clean_host_path(real):
            raise DiscoveryError(f'"{root.host_path(path)}" cannot be named in a spec')
        previous = self.files.get(path)
        self.files[path] = File(
            kind="config",
            host_path=root.host_path(real),
            container_path=path,
            capability=_wider(previous, capability),
            links=_joined(previous, links),
        )


def _wider(previous: Library | File | None, capability: str) -> str:
    """Return the capability of a file that is listed twice: more containers get it."""
    return capability if previous is None else min(previous.capability, capability)


def _joined(previous: Library | File | None, links: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(previous.links if previous else ()), *links]))


def _chain(root: DriverRoot, path: str) -> tuple[str, list[str]]:
    """Return where the symlink *path* leads to in *root*, and `TARGET::LINK` of each on the way.

    Raises DiscoveryError for a loop, and for names that a hook does not accept.
    """
    links: list[str] = []
    for _ in range(_MAX_LINKS):
        target = root.link_target(path)
        if target is None:
            return path, links
        directory = posixpath.dirname(path)
        following = normal(posixpath.join(directory, target))
        if not is_clean_host_path(path) or not is_clean_host_path(following):
            raise DiscoveryError(f'the symlink "{root.host_path(path)}" cannot be named in a hook')
        links.append(f"{posixpath.relpath(following, directory)}::{path}")
        path = following
    raise DiscoveryError(f'the symlink "{root.host_path(path)}" leads to itself')


def _matching(root: DriverRoot, pattern: str) -> list[str]:
    """Return the paths below *root* that *pattern* matches; a plain path is returned if it exists.

    Raises DiscoveryError for a pattern with too many matches.
    """
    paths = ["/"]
    parts = [part for part in normal(pattern).split("/") if part]
    for part in parts:
        following = []
        for path in paths:
            directory = root.directory(path)
            if directory is None:
                continue
            if _SPECIAL.search(part):
                names = sorted(fnmatch.filter(directory.names, part))
            else:
                names = [part] if part in directory.names else []
            following += [posixpath.join(path, name) for name in names]
        if len(following) > _MAX_MATCHES:
            raise DiscoveryError(f'the pattern "{pattern}" has over {_MAX_MATCHES} matches')
        paths = following
    return paths
