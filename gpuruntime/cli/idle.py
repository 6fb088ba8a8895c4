# SPDX-License-Identifier: Apache-2.0
"""Hosts on which the commands of the boot units have nothing to do; reads only."""

from __future__ import annotations

from gpuruntime.cli import system_devices as devices
from gpuruntime.discover import search_paths, user_space_version
from gpuruntime.discover.root import DriverRoot
from gpuruntime.errors import DiscoveryError


def reason(driver_root: str) -> str:
    """Return in one line why there is nothing to do for a GPU of NVIDIA, "" if there is.

    Nothing is, where no module of the driver is loaded, and either no GPU is on the bus or the
    driver *driver_root* is not installed. A driver that is installed and not loaded is a fault.
    """
    if devices.majors(devices.read("/proc/devices")) or devices.read(user_space_version.MODULE):
        return ""
    if not devices.count_on_bus():
        return "nothing to do: this host has no GPU of NVIDIA"
    if not _is_installed(driver_root):
        return "nothing to do: NVIDIA's driver is not installed here"
    return ""


def _is_installed(driver_root: str) -> bool:
    """Return whether *driver_root* has a library of the driver."""
    try:
        found = user_space_version.installed(search_paths.libraries(DriverRoot(driver_root)))
    except DiscoveryError:
        # What is wrong with it is for discovery to say.
        return True
    return bool(found)
