# SPDX-License-Identifier: Apache-2.0
"""Device nodes of the driver below a dev root: which there must be, which there are."""

from __future__ import annotations

import os
import stat

from gpuruntime.errors import DiscoveryError
from gpuruntime.system.paths import Root

CONTROL = ("nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")
# A container without one of these finds no device, whatever else it gets.
REQUIRED = ("nvidia-uvm", "nvidiactl")


def control_nodes(dev_root: Root, dev_root_path: str) -> list[str]:
    """Return the container paths of the control nodes that exist, sorted.

    Raises DiscoveryError if one is missing without which CUDA cannot work.
    """
    found = []
    for name in CONTROL:
        if is_device(dev_root, f"/dev/{name}"):
            found.append(f"/dev/{name}")
        elif name in REQUIRED:
            raise DiscoveryError(
                f'no device node "/dev/{name}" below the dev root "{dev_root_path}"',
                'run "nvidia-modprobe -u -c 0" on the host',
            )
    return found


def is_device(dev_root: Root, path: str) -> bool:
    """Tell whether *path* below *dev_root* is a character device itself, not a link to one."""
    directory, _, name = path.rpartition("/")
    try:
        fd = dev_root.open_directory(directory)
    except OSError:
        return False
    try:
        return stat.S_ISCHR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)
