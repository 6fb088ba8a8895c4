# SPDX-License-Identifier: Apache-2.0
"""Keep the CDI specs of the device plugin as the driver and the MIG devices are."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

from gpunode import plugin_spec
from gpunode.config.effective import Config
from gpunode.plugin_spec import Names, Roots
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.model import Inventory
from gpuruntime.plan.gpu_edits import HOOK_NAME

log = logging.getLogger(__name__)

# Where the driver root of the host is mounted in a container, by convention.
DRIVER_ROOT = "/driver-root"
_INSTALLED_HOOK = f"/usr/bin/{HOOK_NAME}"


def roots(config: Config, exists: Callable[[str], bool] = os.path.exists) -> Roots:
    """Return the directories of the driver and of the device nodes, here and on the host.

    Outside a container both are the same.
    """
    driver = config.container_driver_root
    if driver is None:
        driver = DRIVER_ROOT if exists(DRIVER_ROOT) else config.nvidia_driver_root
    if driver == config.nvidia_driver_root:
        dev = config.nvidia_dev_root
    else:
        dev = driver if exists(f"{driver.rstrip('/')}/dev/nvidiactl") else "/"
    return Roots(driver, config.nvidia_driver_root, dev, config.nvidia_dev_root)


def hook_path(config: Config, exists: Callable[[str], bool] = os.path.exists) -> str:
    """Return the path of the hook program on the host."""
    if config.nvidia_cdi_hook_path:
        return config.nvidia_cdi_hook_path
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), HOOK_NAME)
    is_on_host = config.container_driver_root is None and not exists(DRIVER_ROOT)
    return beside if is_on_host and exists(beside) else _INSTALLED_HOOK


class SpecFiles:
    """The specs that are written, and the names in them; *problem* is why others are not."""

    def __init__(self) -> None:
        self.names = Names()
        self.problem: GpuRuntimeError | None = None
        self._written: tuple[Inventory, Config] | None = None

    async def update(self, inventory: Inventory | None, config: Config) -> None:
        """Write the specs of *inventory* if they may have changed; a failure is a problem."""
        if inventory is None or self._written == (inventory, config):
            return
        try:
            specs = plugin_spec.specs(inventory, config, roots(config), hook_path(config))
            # A file system may be slow, and calls of the kubelet must not wait for it.
            paths = await asyncio.to_thread(plugin_spec.write, specs, config.cdi_spec_dir)
        except GpuRuntimeError as error:
            if self.problem is None or str(self.problem) != str(error):
                log.error("%s", error.lines())
            self.problem = error
            return
        for path in paths:
            log.info('wrote "%s"', path)
        self.names, self.problem = specs.names, None
        self._written = inventory, config
