# SPDX-License-Identifier: Apache-2.0
"""This machine as the runtime sees it, read only; for `gpuruntime explain`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from cdi.complete import in_user_namespace
from cdi.registry import Registry
from gpuruntime.cli import interpreter
from gpuruntime.config import Config
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.log import Log
from gpuruntime.model import Inventory, LeftOutDevice
from gpuruntime.oci import lowlevel
from gpuruntime.plan import devices
from gpuruntime.shim.host import ShimHost
from gpuruntime.snapshots import inventory_snapshot
from gpuruntime.snapshots.inventory_snapshot import Found, InventorySnapshot, inventory_of

RUNTIME = "gpu-container-runtime"


class ExplainHost(ShimHost):
    """The shim's host, read only; keeps what was read from it.

    *inventory* and *specs*, the CDI specs, are None until they are needed. *notes* are sentences
    about what the shim would do and this class does not.
    """

    def __init__(self, config: Config) -> None:
        log = Log(None, json_format=False)
        super().__init__(config, interpreter.of_slow_path(), launcher(), log, saved=None)
        self.inventory: Inventory | None = None
        self.specs: Registry | None = None
        self.notes: list[str] = []

    def read_inventory(self, *, fresh: bool) -> Found:
        """Return the inventory of the snapshot, or a new one, which is not saved."""
        config = self._config

        def discover() -> Any:  # noqa: ANN401 (JSON)
            return inventory_snapshot.discover_machine(config, self._cli_python)

        read = None
        if not fresh and config["health"] != "nvml":
            root, variant = config.driver_root or "/", inventory_snapshot.variant(config)
            read = InventorySnapshot(root, discover, variant=variant).read()
        result = read or Found(inventory_of(discover()), is_fresh=True, state=None)
        self.inventory = result.inventory
        return result

    def read_registry(self) -> Registry:
        """Return the CDI specs of the configured directories."""
        if self.specs is None:
            self.specs = super().read_registry()
        return self.specs

    def left_out(self, ids: Iterable[str]) -> list[LeftOutDevice]:
        """Return the devices that *ids* mean and that discovery left out; [] if it fails."""
        try:
            inventory = self.inventory or self.read_inventory(fresh=True).inventory
        except GpuRuntimeError:
            return []
        return [
            device
            for device in inventory.left_out
            if any(devices.is_name_of(name, device) for name in ids)
        ]

    def make_nodes(self, minors: Sequence[int]) -> bool:
        """Return False; note where the shim would run nvidia-modprobe."""
        del minors
        if not in_user_namespace({}):
            self.notes.append(
                "the runtime would run nvidia-modprobe first, which may make the node"
            )
        return False


def launcher() -> str:
    """Return the path of the runtime that engines call: beside this program, else on PATH."""
    beside = os.path.dirname(os.path.realpath(sys.argv[0]))
    path = shutil.which(RUNTIME, path=f"{beside}:{os.path.dirname(sys.executable)}")
    return path or shutil.which(RUNTIME) or RUNTIME


def find_runtime(config: Config, warnings: list[str]) -> str:
    """Return the low-level runtime that would be executed; raise RuntimeExecError."""
    try:
        status = os.stat(launcher())
        identity = f"{status.st_dev}:{status.st_ino}"
    except OSError:
        # Not installed: then it cannot be among the candidates.
        identity = ""
    return lowlevel.find(config.runtimes, os.environ.get("PATH"), identity, warnings.append)
