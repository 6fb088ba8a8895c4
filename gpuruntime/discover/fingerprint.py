# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a host: the probes that show whether it is still the one in an inventory.

Everything that a spec or a snapshot was computed from is in here, or is checked again when a
container starts. It takes one stat for each directory, not for each file in it; of a path that
does not exist, the first missing part is probed.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Sequence

from gpuruntime import probes
from gpuruntime.discover import device_nodes, driver_table, inventory, user_space
from gpuruntime.discover import search_paths as places
from gpuruntime.discover.other_files import MPS_DIRECTORY, private_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
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


def plan(
    driver_root: str,
    dev_root: str,
    search_paths: Sequence[str] = (),
    config_search_paths: Sequence[str] = (),
    *,
    environment: bool = True,
    proc: str = "/proc",
    sys: str = "/sys",
) -> Plan:
    """Return what to ask, part by part, of the host below both roots, for `host_state.read`.

    With *environment*, what its variables say is asked as well: for who runs under the same ones
    each time. To be made anew with each inventory: it is about the files and GPUs there are now.
    Raises DiscoveryError if the driver root cannot be read.
    """
    root = user_space.DriverRoot(driver_root)
    dev = os.path.abspath(dev_root).rstrip("/")
    variables = user_space.variables() if environment else dict.fromkeys(user_space.VARIABLES, "")
    libraries = _existing(_library_directories(root, search_paths))
    around = [root.around(path) for path in _have_driver(libraries)]
    others = _other_directories(root, around, config_search_paths, variables["XDG_DATA_DIRS"])
    nvidia = f"{proc}/driver/nvidia"
    found = {
        probes.PROGRAM: [probes.PROGRAM, [probes.VERSION, _TABLE]],
        "driver root": [
            probes.PLACE,
            # The former may become a link to another.
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
            _there(
                f"{directory}/{name}"
                for directory in libraries
                for name in (places.CUDA_NAME, places.NVML_NAME)
            ),
        ],
        "programs": [probes.IDENTITY, _programs(root, around)],
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
    if environment:
        found["environment"] = [probes.VARIABLE, list(variables)]
    return found


def boot_id(proc: str = "/proc") -> str:
    """Return the id of this boot, "" if the kernel does not tell."""
    try:
        with open(f"{proc}/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _unique(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(paths))


def _there(paths: Iterable[str]) -> list[str]:
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def _existing(paths: Iterable[str]) -> list[str]:
    """Return *paths*, and in place of one that is not there the first part of it that is not.

    While that is missing there is nothing below it, and many paths have it in common.
    """
    found: dict[str, None] = {}
    for path in paths:
        at = path
        while not os.path.exists(at):
            parent = posixpath.dirname(at)
            if parent == at or os.path.exists(parent):
                break
            at = parent
        found[at] = None
    return list(found)


def _library_directories(root: user_space.DriverRoot, search_paths: Sequence[str]) -> list[str]:
    """Return where libraries can be, and where links lead from there: the host's view of both.

    A link that is absolute means another place to a root apart than to the host.
    """
    usual = [root.host_path(path) for path in user_space.library_directories(root)]
    led = [where.root.host_path(where.path) for where in places.libraries(root, search_paths)]
    return _unique([*(map(os.path.abspath, search_paths) if search_paths else usual), *led])


def _have_driver(directories: Iterable[str]) -> list[str]:
    """Return those of *directories* in which there are libraries of the driver."""
    return [
        directory
        for directory in directories
        if any(places.is_drivers(name) for name in _names(directory))
    ]


def _loader_configuration(root: user_space.DriverRoot) -> list[str]:
    return _existing(root.host_path(path) for path in places.loader_configuration(root))


def _programs(
    root: user_space.DriverRoot, around: Iterable[tuple[user_space.DriverRoot, str]]
) -> list[str]:
    """Return the directories of programs, and the driver's that are in them.

    *around* has the directories of the driver's libraries.
    """
    directories = [root.host_path(path) for path in places.BINARIES]
    for where, directory in around:
        directories += [where.host_path(path) for path in places.programs_beside(directory)]
    names = [row.name for row in driver_table.BINARIES]
    files = (f"{directory}/{name}" for directory in directories for name in names)
    return [*_existing(directories), *_there(files)]


def _other_directories(
    root: user_space.DriverRoot,
    around: Sequence[tuple[user_space.DriverRoot, str]],
    config_search_paths: Sequence[str],
    data_dirs: str,
) -> list[str]:
    """Return where there can be configuration, data, modules of Xorg, firmware, on the host."""
    bases = places.configurations(root, config_search_paths, data_dirs)
    found = [
        (where, posixpath.join(base, posixpath.dirname(row.name)))
        for rows, directories in ((driver_table.CONFIGS, bases), (driver_table.DATA, around))
        for row in rows
        for where, base in directories
    ]
    found += places.xorg(root, around)
    for row in (*driver_table.BINARIES, *driver_table.CONFIGS, *driver_table.XORGS):
        for where, base in around:
            private = private_directory(row, base)
            if private is not None:
                found.append((where, private))
    on_host = [where.host_path(path) for where, path in found]
    for path in places.firmware(root, os.uname().release):
        directory = root.host_path(f"{path}/nvidia")
        # Those of versions are in it, beside those of chips for another driver.
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


def _of_gpus(nvidia: str, sys: str, what: str) -> list[str]:
    return [f"{sys}/{_DEVICES}/{bus_id}/{what}" for bus_id in _names(f"{nvidia}/gpus")]


def _drm_links(nvidia: str, dev: str) -> list[str]:
    return [
        f"{dev}{device_nodes.BY_PATH}/pci-{bus_id}-{kind}"
        for bus_id in _names(f"{nvidia}/gpus")
        for kind in ("card", "render")
    ]


def _mig_directories(capabilities: str) -> list[str]:
    """Return the directories whose names tell each instance that there is."""
    found = [capabilities]
    for gpu in _names(capabilities):
        if gpu.startswith("gpu"):
            migs = f"{capabilities}/{gpu}/mig"
            found += [migs, *(f"{migs}/{name}" for name in _names(migs) if name.startswith("gi"))]
    return found


def _feature_nodes(dev: str) -> list[str]:
    """Return patterns of nodes that _CONTROL_NODES leave, some of which the host can have, too."""
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
