# SPDX-License-Identifier: Apache-2.0
"""The files that init containers wait for: `<component>-ready`, as the GPU operator has them.

Such a file is complete or not there at any time: it is replaced by a rename when its component is
valid again, and removed by an unlink when it is not. It is never removed before a check, since a
program that starts meanwhile would read half of a state.
"""

from __future__ import annotations

import os
import secrets

from gpunode.validation import node_checks
from gpuruntime import atomic_replace
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.errors import GpuRuntimeError

DIRECTORY = "/run/nvidia/validations"
# Where the operator's pods see the host and the root of the driver container.
_HOST_MOUNT, _DRIVER_MOUNT = "/host", "/driver-root"


class ReadyFileError(GpuRuntimeError):
    """A ready file cannot be written or removed."""

    phase = "ready-file"


def driver_variables(machine: ExaminedMachine) -> dict[str, str]:
    """Return what `driver-ready` says: where the driver and its device nodes are."""
    root = node_checks.driver_root(machine) or "/"
    is_host_driver = root != node_checks.DRIVER_CONTAINER
    has_own_nodes = not is_host_driver and machine.exists(f"{root}/dev/nvidiactl")
    return {
        "IS_HOST_DRIVER": "true" if is_host_driver else "false",
        "NVIDIA_DRIVER_ROOT": root,
        "DRIVER_ROOT_CTR_PATH": _mounted(root) if is_host_driver else _DRIVER_MOUNT,
        "NVIDIA_DEV_ROOT": root if has_own_nodes else "/",
        "DEV_ROOT_CTR_PATH": _DRIVER_MOUNT if has_own_nodes else _HOST_MOUNT,
    }


def _mounted(root: str) -> str:
    return f"{_HOST_MOUNT}{root}".rstrip("/")


class ReadyFiles:
    """The ready files in *directory*, which is made when it is needed."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def write(self, component: str, text: str = "") -> None:
        """Replace the file of *component*; raise ReadyFileError."""
        path = self._path(component)
        # Not by process id: in a pod it is the same each time, and a file may be left over.
        temporary = os.path.join(self.directory, f".{component}.{secrets.token_hex(4)}")
        try:
            os.makedirs(self.directory, 0o755, exist_ok=True)
            atomic_replace.replace(path, temporary, text.encode(), lambda fd: os.fchmod(fd, 0o644))
        except OSError as error:
            raise self._error("write", path, error) from error

    def remove(self, component: str) -> None:
        """Remove the file of *component* if it is there; raise ReadyFileError."""
        path = self._path(component)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._error("remove", path, error) from error

    def _path(self, component: str) -> str:
        return os.path.join(self.directory, f"{component}-ready")

    def _error(self, verb: str, path: str, error: OSError) -> ReadyFileError:
        return ReadyFileError(
            f'cannot {verb} "{path}": {error.strerror}',
            "name a directory that this user can write: --output-dir",
        )
