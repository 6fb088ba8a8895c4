# SPDX-License-Identifier: Apache-2.0
"""Detect hosts on which the commands of the boot units have nothing to do; reads only."""

from __future__ import annotations

from gpuruntime.cli import system_devices as devices
from gpuruntime.discover import search_paths, user_space_version
from gpuruntime.discover.root import DriverRoot
from gpuruntime.errors import DiscoveryError


def reason(driver_root: str) -> str:
    """Return in one line why there is nothing to do on this host, "" if there is something to do.

    There is nothing to do if no module of the driver is loaded, and either no GPU is on the bus or
    no driver is installed below *driver_root*. A driver that is installed but not loaded is a
    fault, and so a reason to go on.
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
        versions = user_space_version.installed(search_paths.libraries(DriverRoot(driver_root)))
    except DiscoveryError:
        # The discovery that follows reports the fault.
        return True
    return bool(versions)
