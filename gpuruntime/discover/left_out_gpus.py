# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine that NVML does not offer, and why, as far as the kernel knows them.

NVML says little about a GPU that failed, and nothing about one bound to another kernel driver.
The kernel lists the driver's GPUs in /proc/driver/nvidia/gpus, and all GPUs in /sys/bus/pci.
"""

from __future__ import annotations

import os
import re

from gpuruntime import remedies
from gpuruntime.model import LeftOutDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpuruntime.model import Gpu

_DRIVER = "nvidia"
# Compiled where they are used: on most hosts NVML lists every GPU.
_BUS_ID = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z"
_UUID = r"(?m)^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$"
_MINOR = r"(?m)^Device Minor:\s*([0-9]{1,7})\s*$"
_EXCLUDED = r"(?m)^GPU Excluded:\s*Yes\s*$"
_MAX_BYTES = 1 << 16


def completed(
    failed: Iterable[LeftOutDevice], gpus: Sequence[Gpu], *, proc: str = "/proc"
) -> tuple[LeftOutDevice, ...]:
    """Return *failed*, with the PCI addresses and UUIDs that the kernel knows.

    *failed* are the GPUs and MIG devices for which NVML returned an error, *gpus* those that it
    described.
    """
    failed = tuple(failed)
    by_index = _bus_ids_by_index(gpus, proc) if failed else {}
    devices = []
    for device in failed:
        bus_id = device.bus_id or by_index.get(device.name, "")
        uuid = device.uuid
        if bus_id and not uuid:
            uuid = _uuid(_information(proc, bus_id))
        devices.append(
            LeftOutDevice(
                name=device.name,
                uuid=uuid,
                bus_id=bus_id,
                reason=device.reason,
                hint=device.hint,
            )
        )
    return tuple(devices)


def unlisted(
    listed: Iterable[str],
    has_node: Callable[[str], bool] = os.path.exists,
    *,
    proc: str = "/proc",
    sys: str = "/sys",
) -> tuple[list[LeftOutDevice], list[LeftOutDevice]]:
    """Return the GPUs whose PCI addresses are not in *listed*: those at fault, then the others.

    *has_node* returns whether the device node at a path in /dev exists. The others are GPUs that
    the operator withholds from the driver or, if this process runs in a container, from it.
    """
    listed = frozenset(listed)
    at_fault, kept_away = [], []
    for bus_id in _driver_bus_ids(proc):
        if bus_id in listed:
            continue
        information = _information(proc, bus_id)
        minor = re.search(_MINOR, information)
        node = f"/dev/nvidia{minor[1]}" if minor else ""
        if re.search(_EXCLUDED, information):
            kept_away.append(
                LeftOutDevice(
                    uuid=_uuid(information),
                    bus_id=bus_id,
                    reason="the option NVreg_ExcludedGpus of the module nvidia excludes it",
                    hint="remove the GPU from NVreg_ExcludedGpus, and reboot",
                )
            )
        elif minor and not has_node(node):
            kept_away.append(
                LeftOutDevice(
                    uuid=_uuid(information),
                    bus_id=bus_id,
                    reason=f'no device node "{node}"',
                    hint=remedies.missing_node(remedies.LiveHost(), node),
                )
            )
        else:
            at_fault.append(
                LeftOutDevice(
                    uuid=_uuid(information),
                    bus_id=bus_id,
                    reason="the module nvidia has it, but NVML does not list it",
                    hint=remedies.RESET_GPU,
                )
            )
    host = remedies.LiveHost(sys.removesuffix("/sys"))
    for bus_id, driver in remedies.drivers_on_bus(host).items():
        if bus_id not in listed and driver != _DRIVER:
            kept_away.append(
                LeftOutDevice(
                    bus_id=bus_id,
                    reason=_of_other_driver(driver),
                    hint=remedies.other_kernel_driver(driver),
                )
            )
    return at_fault, kept_away


def _of_other_driver(driver: str) -> str:
    return f'the kernel driver "{driver}" has it' if driver else "no kernel driver has it"


def _bus_ids_by_index(gpus: Sequence[Gpu], proc: str) -> dict[str, str]:
    """Return NVML's index → PCI address; {} if the driver's order is not that of *gpus*.

    NVML numbers the driver's GPUs in the order of their PCI addresses.
    """
    by_index = dict(enumerate(_driver_bus_ids(proc)))
    if any(gpu.bus_id != by_index.get(gpu.index) for gpu in gpus):
        return {}
    return {str(index): bus_id for index, bus_id in by_index.items()}


def _driver_bus_ids(proc: str) -> list[str]:
    """Return the PCI addresses of the GPUs that the module nvidia lists, in order."""
    names = [name for name in _names(f"{proc}/driver/nvidia/gpus") if re.match(_BUS_ID, name)]
    return sorted(names, key=_place)


def _place(bus_id: str) -> tuple[int, str]:
    domain, _, rest = bus_id.partition(":")
    return int(domain, 16), rest


def _information(proc: str, bus_id: str) -> str:
    return _read(f"{proc}/driver/nvidia/gpus/{bus_id}/information")


def _uuid(information: str) -> str:
    match = re.search(_UUID, information)
    return match[1] if match else ""


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read(_MAX_BYTES)
    except OSError:
        return ""
