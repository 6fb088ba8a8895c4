# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a host: the probes that show whether it is still the one in an inventory.

The fingerprint covers every input of a spec or a snapshot that is not checked again when a
container starts. A directory takes one stat, not one for each file in it; for a path that does
not exist, the first missing part is probed.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Sequence

from gpuruntime import probes
from gpuruntime.discover import (
    device_nodes,
    driver_table,
    inventory,
    platforms,
    programs,
    tegra,
    user_space,
)
from gpuruntime.discover import search_paths as places
from gpuruntime.discover.other_files import MPS_DIRECTORY, private_directory
from gpuruntime.errors import DiscoveryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuruntime.probes import Plan

_MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
_RUN = ("/run", "/var/run")
_TABLE = "discover/driver_table.py"
_DEVICES = "bus/pci/devices"
_CONTROL_NODES = (
    "/dev/nvidia*",
    f"{device_nodes.CAPS}/*",
    f"{device_nodes.CHANNELS}/*",
    f"{device_nodes.DRI}/*",
)


def plan(  # noqa: PLR0913 (options, given by name)
    driver_root: str,
    dev_root: str,
    search_paths: Sequence[str] = (),
    config_search_paths: Sequence[str] = (),
    *,
    program_search_paths: Sequence[str] = (),
    environment: bool = True,
    csv: tegra.CsvOptions | None = None,
    proc: str = "/proc",
    sys: str = "/sys",
) -> Plan:
    """Return the probes of the host below both roots, by part, for `probes.read`.

    With *environment*, the plan includes the environment variables: for a caller that always runs
    under the same ones. It does not include PATH, which differs between a shell and a unit, but
    the directories that PATH names now. *csv* are the options for a Tegra. Make a new plan with
    each inventory: it names the files and GPUs that exist now. Raises DiscoveryError if the driver
    root cannot be read.
    """
    root = user_space.DriverRoot(driver_root)
    dev = os.path.abspath(dev_root).rstrip("/")
    variables = user_space.variables() if environment else dict.fromkeys(user_space.VARIABLES, "")
    libraries = _existing(_library_directories(root, search_paths))
    around = [root.around(path) for path in _with_driver_libraries(libraries)]
    others = _other_directories(root, around, config_search_paths, variables["XDG_DATA_DIRS"])
    nvidia = f"{proc}/driver/nvidia"
    parts: dict[str, list[Any]] = {
        probes.PROGRAM: [probes.PROGRAM, [probes.VERSION, _TABLE]],
        "driver root": [
            probes.PLACE,
            # The driver root as configured may become a symlink to another directory.
            _unique([os.path.abspath(driver_root), root.path]),
        ],
        "modules": [probes.PLACE, [f"{sys}/module/{name}" for name in _MODULES]],
        "majors": [probes.CONTENT, [f"{proc}/devices"]],
        "module version": [
            probes.CONTENT,
            _unique([f"{nvidia}/version", root.host_path("/proc/driver/nvidia/version")]),
        ],
        "GPUs": [probes.NAMES, [f"{nvidia}/gpus"]],
        "drivers of GPUs": [probes.LINK, _of_gpus(nvidia, sys, "driver")],
        "MIG devices": [probes.NAMES, _mig_directories(f"{nvidia}/capabilities")],
        "MIG capabilities": [probes.CONTENT, [f"{proc}/driver/nvidia-caps/mig-minors"]],
        "loader cache": [probes.IDENTITY, [root.host_path("/etc/ld.so.cache")]],
        "loader configuration": [probes.IDENTITY, _loader_configuration(root)],
        "library directories": [probes.IDENTITY, libraries],
        "libraries": [
            probes.IDENTITY,
            _only_existing(
                f"{directory}/{name}"
                for directory in libraries
                for name in (places.CUDA_NAME, places.NVML_NAME)
            ),
        ],
        "programs": [
            probes.IDENTITY,
            _programs(
                programs.places(
                    root,
                    around,
                    program_search_paths,
                    os.environ.get(user_space.PATH, "") if environment else "",
                )
            ),
        ],
        "other files": [probes.IDENTITY, _existing(others)],
        "firmware path": [probes.CONTENT, _firmware_paths(root, sys)],
        "device nodes": [probes.NODES, [f"{dev}{path}" for path in _CONTROL_NODES]],
        "DRM devices": [probes.NAMES, _of_gpus(nvidia, sys, "drm")],
        "DRM links": [probes.LINK, _drm_links(nvidia, dev)],
        "nodes of features": [probes.NODES, _feature_nodes(dev)],
        "sockets": [
            probes.NODES,
            _sockets(root, variables["CUDA_MPS_PIPE_DIRECTORY"] or MPS_DIRECTORY),
        ],
        "files of features": [
            probes.EXISTS,
            _unique(
                path
                for file in (inventory.UDEV, inventory.CUFILE)
                for path in (root.host_path(file), file)
            ),
        ],
    }
    parts.update(_of_platform(root, dev_root, csv or tegra.CsvOptions()))
    if environment:
        parts["environment"] = [probes.VARIABLE, list(variables)]
    return parts


def _of_platform(
    root: user_space.DriverRoot, dev_root: str, csv: tegra.CsvOptions
) -> dict[str, list[Any]]:
    """Return the probes of the platforms whose marks the machine has, none on most machines."""
    try:
        dev = device_nodes.DevRoot(dev_root)
    except DiscoveryError:
        # Discovery reports it.
        return {}
    try:
        marks = platforms.marks(root, dev)
        parts: dict[str, list[Any]] = {}
        if marks.dxg:
            stores = f"{root.host_path(platforms.WSL_DRIVERS)}"
            directories = [stores, *(f"{stores}/{name}" for name in _names(stores))]
            libraries = [root.host_path(platforms.WSL_LIBRARIES), marks.dxcore]
            parts["node of WSL"] = [probes.NODES, [f"{dev.path.rstrip('/')}{platforms.DXG}"]]
            parts["files of WSL"] = [
                probes.IDENTITY,
                _existing(path for path in (*libraries, *directories) if path),
            ]
        if marks.tegra or csv.files:
            files, directories, nodes = tegra.inputs(root, dev, csv)
            parts["CSV files"] = [probes.IDENTITY, _existing(files)]
            parts["directories of CSV entries"] = [probes.IDENTITY, _existing(directories)]
            parts["nodes of CSV entries"] = [probes.NODES, nodes]
        return parts
    finally:
        dev.close()


def boot_id(proc: str = "/proc") -> str:
    """Return the id of this boot, "" if it cannot be read."""
    try:
        with open(f"{proc}/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _unique(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(paths))


def _only_existing(paths: Iterable[str]) -> list[str]:
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def _existing(paths: Iterable[str]) -> list[str]:
    """Return *paths*, each missing one replaced by its first missing parent directory.

    While that parent is missing, nothing exists below it, and many paths share it.
    """
    probed: dict[str, None] = {}
    existing: dict[str, bool] = {}

    def exists(path: str) -> bool:
        if path not in existing:
            existing[path] = os.path.exists(path)
        return existing[path]

    for path in paths:
        missing = path
        while not exists(missing):
            parent = posixpath.dirname(missing)
            if parent == missing or exists(parent):
                break
            missing = parent
        probed[missing] = None
    return list(probed)


def _library_directories(root: user_space.DriverRoot, search_paths: Sequence[str]) -> list[str]:
    """Return where libraries can be, and where symlinks lead from there, as host paths.

    An absolute symlink resolves to another path inside a driver root than on the host.
    """
    usual = [root.host_path(path) for path in user_space.library_directories(root)]
    resolved = [where.root.host_path(where.path) for where in places.libraries(root, search_paths)]
    return _unique([*(map(os.path.abspath, search_paths) if search_paths else usual), *resolved])


def _with_driver_libraries(directories: Iterable[str]) -> list[str]:
    """Return those of *directories* that contain libraries of the driver."""
    return [
        directory
        for directory in directories
        if any(places.is_drivers(name) for name in _names(directory))
    ]


def _loader_configuration(root: user_space.DriverRoot) -> list[str]:
    return _existing(root.host_path(path) for path in places.loader_configuration(root))


def _programs(places: Iterable[programs.Place]) -> list[str]:
    """Return the directories *places* of programs, and the driver's programs in them."""
    directories = [place.host_path for place in places]
    names = [row.name for row in driver_table.BINARIES]
    files = (f"{directory}/{name}" for directory in directories for name in names)
    return [*_existing(directories), *_only_existing(files)]


def _other_directories(
    root: user_space.DriverRoot,
    around: Sequence[tuple[user_space.DriverRoot, str]],
    config_search_paths: Sequence[str],
    data_dirs: str,
) -> list[str]:
    """Return the host paths where configuration, data, Xorg modules and firmware can be."""
    bases = places.configurations(root, config_search_paths, data_dirs)
    if not config_search_paths:
        bases += places.configurations_beside(around)
    candidates = [
        (where, posixpath.join(base, posixpath.dirname(row.name)))
        for rows, directories in ((driver_table.CONFIGS, bases), (driver_table.DATA, around))
        for row in rows
        for where, base in directories
    ]
    candidates += places.xorg(root, around)
    for row in (*driver_table.BINARIES, *driver_table.CONFIGS, *driver_table.XORGS):
        for where, base in around:
            private = private_directory(row, base)
            if private is not None:
                candidates.append((where, private))
    on_host = [where.host_path(path) for where, path in candidates]
    for path in places.firmware(root, os.uname().release):
        directory = root.host_path(f"{path}/nvidia")
        # It has a directory for each driver version, and others, named after chips, for nouveau.
        versions = [name for name in _names(directory) if name[0].isdigit()]
        on_host += [directory, *(f"{directory}/{name}" for name in versions)]
    return on_host


def _firmware_paths(root: user_space.DriverRoot, sys: str) -> list[str]:
    return _unique([f"{sys}{places.FIRMWARE_PATH}", root.host_path(f"/sys{places.FIRMWARE_PATH}")])


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _of_gpus(nvidia: str, sys: str, entry: str) -> list[str]:
    return [f"{sys}/{_DEVICES}/{bus_id}/{entry}" for bus_id in _names(f"{nvidia}/gpus")]


def _drm_links(nvidia: str, dev: str) -> list[str]:
    return [
        f"{dev}{device_nodes.BY_PATH}/pci-{bus_id}-{kind}"
        for bus_id in _names(f"{nvidia}/gpus")
        for kind in ("card", "render")
    ]


def _mig_directories(capabilities: str) -> list[str]:
    """Return the directories whose entries name every MIG instance."""
    directories = [capabilities]
    for gpu in _names(capabilities):
        if gpu.startswith("gpu"):
            migs = f"{capabilities}/{gpu}/mig"
            directories += [
                migs,
                *(f"{migs}/{name}" for name in _names(migs) if name.startswith("gi")),
            ]
    return directories


def _feature_nodes(dev: str) -> list[str]:
    """Return the patterns of feature nodes that _CONTROL_NODES does not cover, on both roots."""
    return _unique(
        f"{root}{pattern}"
        for feature, patterns in device_nodes.FEATURES.items()
        for root in (dev, *([""] if feature in device_nodes.HOST_FEATURES else []))
        for pattern in patterns
        if root != dev or not pattern.startswith("/dev/nvidia")
    )


def _sockets(root: user_space.DriverRoot, mps_directory: str) -> list[str]:
    paths = [f"{run}/{row.name}" for row in driver_table.SOCKETS for run in _RUN]
    return [root.host_path(path) for path in (*paths, mps_directory)]
