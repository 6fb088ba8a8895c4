# SPDX-License-Identifier: Apache-2.0
"""The driver of this host, as the commands and the manager of MIG use it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gpunode.mig import commands
from gpunode.mig.writer import ChildWriter
from gpuruntime.discover import user_space
from gpuruntime.discover.root import DriverRoot

_RESET_PROGRAM = "nvidia-smi"


class Host:
    """The driver below *driver_root*; *timeout* is the time for one call of NVML in seconds."""

    def __init__(self, driver_root: str, state_directory: str, timeout: float) -> None:
        self.driver_root = driver_root
        self.state_directory = state_directory
        self._timeout = timeout

    def writer(self) -> ChildWriter:
        """Return a new process that calls NVML; raise GpuRuntimeError."""
        library = user_space.find_nvml(DriverRoot(self.driver_root))
        return ChildWriter(library, self._timeout)

    def state(self) -> list[dict[str, Any]]:
        """Return the state of all GPUs; raise GpuRuntimeError."""
        with self.writer() as writer:
            gpus: list[dict[str, Any]] = writer.call("state")
        return gpus

    def reset(self, bus_ids: Sequence[str]) -> None:
        """Reset GPUs by the nvidia-smi of the driver root; raise GpuRuntimeError."""
        program = os.path.join(self.driver_root, "usr/bin", _RESET_PROGRAM)
        commands.reset_by(program if os.path.exists(program) else _RESET_PROGRAM, bus_ids)
