# SPDX-License-Identifier: Apache-2.0
"""Put together what the driver root, NVML and the dev root say into one inventory."""

from __future__ import annotations

from collections.abc import Sequence

from gpuruntime.discover import driver, nodes, nvml
from gpuruntime.errors import DiscoveryError
from gpuruntime.model import Inventory


def discover(
    driver_root: str,
    dev_root: str,
    *,
    library_search_path: Sequence[str] = (),
    config_search_path: Sequence[str] = (),
    management: bool = False,
    deadline_s: float = nvml.DEADLINE_S,
) -> Inventory:
    """Read the machine below *driver_root* and *dev_root*.

    With *management* no GPU is asked for, and the nodes of all are taken. Raises DriverError if
    the driver does not answer within *deadline_s*, DiscoveryError if files or nodes are missing.
    """
    root = driver.DriverRoot(driver_root)
    library = driver.find_nvml(root, library_search_path)
    answer = nvml.query(library, deadline_s)
    found = driver.find_driver(
        root,
        answer.driver_version,
        library_search_path=library_search_path,
        config_search_path=config_search_path,
    )
    dev = nodes.DevRoot(dev_root)
    try:
        if management:
            return Inventory(
                driver=found,
                gpus=(),
                control_nodes=(),
                management_nodes=nodes.management_nodes(dev),
                problems=answer.problems,
            )
        gpus, problems = nodes.gpu_nodes(answer.gpus, dev)
        problems = (
            *answer.problems,
            *problems,
            *(
                f"GPU {item.gpu.index} is in MIG mode and has no MIG device"
                for item in gpus
                if item.gpu.mig_enabled and not item.mig
            ),
        )
        if not gpus:
            raise DiscoveryError(
                "no GPU can be used" + "".join(f"; {problem}" for problem in problems),
                'check that "nvidia-smi -L" lists it on the host, which also makes the nodes'
                if dev.path == "/" or answer.problems
                else 'name the directory whose "dev" holds the nodes with "--dev-root"',
            )
        return Inventory(
            driver=found,
            gpus=gpus,
            control_nodes=nodes.control_nodes(dev),
            problems=problems,
        )
    finally:
        dev.close()
