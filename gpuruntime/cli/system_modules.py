# SPDX-License-Identifier: Apache-2.0
"""Load the driver's kernel modules, from the host or from a driver root."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from gpuruntime import remedies
from gpuruntime.errors import DriverError, escape

MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset")
_MODPROBE = "/sbin/modprobe"
_TIMEOUT_S = 120
# Messages of modprobe if Secure Boot refuses a module: EKEYREJECTED and ENOKEY.
_REFUSED_SIGNATURES = ("Key was rejected by service", "Required key not available")


def load(root: str, *, dry_run: bool, say: Callable[[str], object]) -> None:
    """Load MODULES from *root*, or only *say* the commands; raise DriverError."""
    for module in MODULES:
        command = [_MODPROBE, module]
        if root != "/":
            command = ["chroot", root, *command]
        if dry_run:
            say(" ".join(command))
            continue
        try:
            process = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                cwd="/",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(module, str(error)) from error
        if process.returncode != 0:
            raise _failed(module, process.stderr.decode("utf-8", "replace").strip())


def _failed(module: str, why: str) -> DriverError:
    """Return the error for *module*, which modprobe did not load because of *why*."""
    if any(text in why for text in _REFUSED_SIGNATURES):
        action = remedies.SIGN_MODULE
    else:
        _, action = remedies.unloaded_module(remedies.LiveHost())
        if action == remedies.create_nodes():
            # The action would be the command that is running.
            action = remedies.CHECK_LOG
    return DriverError(f'cannot load the module "{module}": {escape(why)}', action)
