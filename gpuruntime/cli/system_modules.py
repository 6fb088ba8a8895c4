# SPDX-License-Identifier: Apache-2.0
"""Load the driver's kernel modules, from the host or from a driver root."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from gpuruntime.discover import left_out_gpus
from gpuruntime.errors import DriverError, escape

MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset")
_MODPROBE = "/sbin/modprobe"
_TIMEOUT_S = 120


def load(root: str, *, dry_run: bool, say: Callable[[str], object]) -> None:
    """Load MODULES from *root*, or only *say* the commands; raise DriverError at a failure."""
    for module in MODULES:
        command = [_MODPROBE, module]
        if root != "/":
            command = ["chroot", root, *command]
        if dry_run:
            say(" ".join(command))
            continue
        try:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                cwd="/",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(module, str(error)) from error
        if done.returncode != 0:
            raise _failed(module, done.stderr.decode("utf-8", "replace").strip())


def _failed(module: str, why: str) -> DriverError:
    reason, hint = left_out_gpus.module_obstacle()
    return DriverError(
        f'cannot load the module "{module}": {escape(why)}{reason}',
        hint or 'install the driver for this kernel, and read the output of "dmesg"',
    )
