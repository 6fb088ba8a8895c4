# SPDX-License-Identifier: Apache-2.0
"""Detect hosts on which the commands of the boot units have nothing to do; changes nothing."""

from __future__ import annotations

from gpuruntime.cli import system_devices as devices
from gpuruntime.discover import search_paths, user_space_version
from gpuruntime.discover.root import DriverRoot
from gpuruntime.errors import DiscoveryError


def reason(driver_root: str) -> str:
    """Return a line that says why there is nothing to do on this host, "" if there is work.

    There is nothing to do if no module of the driver is loaded, and either no GPU is on the bus or
    no driver is installed below *driver_root*. If a driver is installed but not loaded, the
    commands must run, and report that.
    """
    if devices.majors(devices.read("/proc/devices")) or devices.read(user_space_version.MODULE):
        return ""
    if not devices.count_on_bus():
        return "nothing to do: this host has no NVIDIA GPU"
    if not _is_installed(driver_root):
        return "nothing to do: the NVIDIA driver is not installed"
    return ""


def _is_installed(driver_root: str) -> bool:
    """Return whether *driver_root* has a library of the driver."""
    try:
        versions = user_space_version.installed(search_paths.libraries(DriverRoot(driver_root)))
    except DiscoveryError:
        # The discovery that follows reports the fault.
        return True
    return bool(versions)
