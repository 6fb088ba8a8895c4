# SPDX-License-Identifier: Apache-2.0
"""What identifies the state of a host that a spec was made from; cheap to read.

Whatever a spec's content was computed from is in here, or is looked at again when a container
starts. Parts are compared for equality, never for age: clocks are set back.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from gpuruntime import __version__
from gpuruntime.discover import driver, places, table

Fingerprint = dict[str, Any]

# What discovery reads of the environment.
_VARIABLES = ("XDG_DATA_DIRS", "CUDA_MPS_PIPE_DIRECTORY")
_MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
# Appear and go while the driver stays.
_SOCKETS = (
    *("/run/nvidia-persistenced/socket", "/var/run/nvidia-persistenced/socket"),
    *("/run/nvidia-fabricmanager/socket", "/var/run/nvidia-fabricmanager/socket"),
    "/tmp/nvidia-mps",  # noqa: S108 (where MPS has it, unless told otherwise)
)
_NODE_DIRECTORIES = ("/dev", "/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels", "/dev/dri")


def read(
    driver_root: str,
    dev_root: str,
    search_paths: Iterable[str] = (),
    config_search_paths: Sequence[str] = (),
    *,
    proc: str = "/proc",
    sys: str = "/sys",
) -> Fingerprint:
    """Return the fingerprint, part by part, of the host below both roots.

    What is not there is a part as well. Raises DiscoveryError if the driver root cannot be read.
    """
    root = driver.DriverRoot(driver_root)
    directories = [root.host_path(path) for path in driver.library_directories(root)]
    directories += search_paths
    nvidia = f"{proc}/driver/nvidia"
    return {
        "program": [__version__, _digest_of_table()],
        "environment": [os.environ.get(name) for name in _VARIABLES],
        "driver root": _place(root.path),
        "modules": {name: _place(f"{sys}/module/{name}") for name in _MODULES},
        "majors": _digest(f"{proc}/devices"),
        "module version": _digest(f"{nvidia}/version"),
        "GPUs": _names(f"{nvidia}/gpus"),
        "MIG devices": _mig_names(f"{nvidia}/capabilities"),
        "loader cache": _identity(root.host_path("/etc/ld.so.cache")),
        "library directories": identities(directories),
        "libraries": identities(
            f"{directory}/{name}"
            for directory in directories
            for name in ("libcuda.so.1", driver.NVML_NAME)
        ),
        "programs": identities(
            root.host_path(f"{directory}/{row.name}")
            for row in table.BINARIES
            for directory in places.BINARIES
        ),
        "other files": identities(_other_directories(root, config_search_paths)),
        "device nodes": _nodes(dev_root),
        "sockets": [path for path in _SOCKETS if os.path.lexists(root.host_path(path))],
    }


def changes(old: Fingerprint, new: Fingerprint) -> list[str]:
    """Return the names of the parts in which the two differ."""
    return [name for name in new if new[name] != old.get(name)]


def boot_id(proc: str = "/proc") -> str:
    """Return the id of this boot, "" if the kernel does not tell."""
    try:
        with open(f"{proc}/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _digest_of_table() -> str:
    with open(table.__file__, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()[:32]


def _digest(path: str) -> str | None:
    try:
        with open(path, "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()[:32]
    except OSError:
        return None


def _place(path: str) -> list[int] | None:
    """Return device and inode; that of a kernel module is new at each load."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_dev, status.st_ino]


def _identity(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [
        *(status.st_dev, status.st_ino, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    ]


def identities(paths: Iterable[str]) -> dict[str, list[int]]:
    """Return path → identity of those of *paths* that are there."""
    found = {path: _identity(path) for path in dict.fromkeys(paths)}
    return {path: identity for path, identity in found.items() if identity is not None}


def _other_directories(root: driver.DriverRoot, config_search_paths: Sequence[str]) -> list[str]:
    """Return where there can be firmware and files of configuration, on the host."""
    bases = places.configurations(root, config_search_paths, os.environ.get("XDG_DATA_DIRS", ""))
    found = [
        where.host_path(f"{base}/{os.path.dirname(row.name)}")
        for row in table.CONFIGS
        for where, base in bases
    ]
    firmware = places.firmware(root, os.uname().release)
    return [*found, *(root.host_path(f"{path}/nvidia") for path in firmware)]


def _names(directory: str) -> list[str] | None:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return None


def _mig_names(capabilities: str) -> list[str]:
    found = []
    for gpu in _names(capabilities) or ():
        for gi in _names(f"{capabilities}/{gpu}/mig") or ():
            found += [f"{gpu}/{gi}/{ci}" for ci in _names(f"{capabilities}/{gpu}/mig/{gi}") or ()]
    return found


def _nodes(dev_root: str) -> dict[str, list[int]]:
    found = {}
    for directory in _NODE_DIRECTORIES:
        for name in _names(f"{dev_root}{directory}") or ():
            if directory == "/dev" and not name.startswith("nvidia"):
                continue
            try:
                status = os.lstat(f"{dev_root}{directory}/{name}")
            except OSError:
                continue
            found[f"{directory}/{name}"] = [
                *(status.st_mode, status.st_uid, status.st_gid, status.st_rdev)
            ]
    return found
