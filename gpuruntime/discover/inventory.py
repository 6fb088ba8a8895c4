# SPDX-License-Identifier: Apache-2.0
"""Put together what the driver root, NVML and the dev root say into one inventory."""

from __future__ import annotations

import os
import posixpath

from gpuruntime.discover import driver, nodes, nvml
from gpuruntime.errors import DiscoveryError
from gpuruntime.model import Inventory, Node
from gpuruntime.system.paths import Root


def discover(driver_root: str, dev_root: str, deadline_s: float = nvml.DEADLINE_S) -> Inventory:
    """Read the machine below *driver_root* and *dev_root*.

    Raises DriverError if the driver does not answer within *deadline_s*, DiscoveryError if files
    or nodes are missing.
    """
    root = driver.DriverRoot(driver_root)
    answer = nvml.query(driver.find_nvml(root), deadline_s)
    try:
        devices = Root(os.path.realpath(dev_root))
    except OSError as error:
        raise DiscoveryError(
            f'cannot open the dev root "{dev_root}": {error.strerror}',
            'name the directory whose "dev" holds the nodes with "--dev-root"',
        ) from error
    problems = list(answer.problems)
    gpus = []
    for gpu in answer.gpus:
        path = f"/dev/nvidia{gpu.minor}"
        if nodes.is_device(devices, path):
            gpus.append((gpu, _node(dev_root, path)))
        else:
            problems.append(f'GPU {gpu.index} is left out: no device node "{path}"')
    if not gpus:
        raise DiscoveryError(
            "no GPU can be used" + "".join(f"; {problem}" for problem in problems),
            'name the directory whose "dev" holds the nodes with "--dev-root"'
            if answer.gpus
            else 'check that "nvidia-smi -L" works on the host',
        )
    return Inventory(
        driver_version=answer.driver_version,
        gpus=tuple(gpus),
        control_nodes=tuple(
            _node(dev_root, path) for path in nodes.control_nodes(devices, dev_root)
        ),
        libraries=tuple(driver.find_libraries(root, answer.driver_version)),
        binaries=tuple(driver.find_binaries(root)),
        problems=tuple(problems),
    )


def _node(dev_root: str, path: str) -> Node:
    host_path = posixpath.normpath(f"{os.path.abspath(dev_root)}/{path}")
    # POSIX keeps two leading slashes.
    return Node(host_path="/" + host_path.lstrip("/"), container_path=path)
