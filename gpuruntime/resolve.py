# SPDX-License-Identifier: Apache-2.0
"""Device ids and GPUs → the devices that are meant, and the names that each can have; pure.

On the start path. What an id may be is the incumbent's `--device-id`: `all`, `none`, an index
`N` or `N:M`, a UUID `GPU-…`, `MIG-…`, or `MIG-GPU-…/<gi>/<ci>` of older drivers.
"""

from __future__ import annotations

import re

from cdi.names import DEVICE
from gpuruntime.errors import RequestError, UnresolvedDeviceError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuruntime.model import GpuNodes, MigDevice, Node

ALL = "all"
NONE = "none"
INDEX, UUID, TYPE_INDEX = "index", "uuid", "type-index"
STRATEGIES = (INDEX, UUID, TYPE_INDEX)
# A workstation's GPU that only drives its monitors, and that no container is to compute on.
DISPLAY_ONLY = ("DGX Display", "NVIDIA DGX Display")
_INDEX = re.compile(r"[0-9]{1,9}\Z")
_MIG_INDEX = re.compile(r"([0-9]{1,9}):([0-9]{1,9})\Z")
_HEX = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_UUID = re.compile(rf"(?:GPU|MIG)-{_HEX}\Z", re.IGNORECASE)
_OLD_MIG_UUID = re.compile(rf"MIG-(GPU-{_HEX})/([0-9]+)/([0-9]+)\Z", re.IGNORECASE)


class Device(Record):
    """A full GPU, or the MIG device *mig* of it: (device, node of its GPU instance, of itself)."""

    __slots__ = ("gpu", "mig")

    def __init__(self, gpu: GpuNodes, mig: tuple[MigDevice, Node, Node] | None = None) -> None:
        self.gpu = gpu
        self.mig = mig

    @property
    def uuid(self) -> str:
        """Its UUID, "" if the driver does not tell."""
        return self.gpu.gpu.uuid if self.mig is None else self.mig[0].uuid

    def name(self, strategy: str) -> str:
        """Return its name by *strategy*, "" if it has none that CDI takes.

        Drivers before 470 have slashes in the UUIDs of MIG devices.
        """
        index = str(self.gpu.gpu.index)
        if self.mig is None:
            kind = "gpu"
        else:
            index, kind = f"{index}:{self.mig[0].index}", "mig"
        name = {INDEX: index, UUID: self.uuid, TYPE_INDEX: f"{kind}{index}"}[strategy]
        return name if DEVICE.match(name) else ""


def devices(ids: Sequence[str], gpus: Iterable[GpuNodes]) -> list[Device]:
    """Return the devices that *ids* mean among *gpus*, in order, each once.

    The first `all` or `none` among *ids* decides alone. Raises RequestError for what is no id,
    and UnresolvedDeviceError for a device that is not there.
    """
    gpus = list(gpus)
    for name in ids:
        if name == NONE:
            return []
        if name == ALL:
            return _all(gpus)
    found: dict[str, Device] = {}
    for name in ids:
        device = _one(name, gpus)
        found.setdefault(device.name(INDEX), device)
    return list(found.values())


def _all(gpus: list[GpuNodes]) -> list[Device]:
    """Return the full GPUs that are used as such, then all MIG devices."""
    full = [
        Device(gpu) for gpu in gpus if not gpu.gpu.mig_enabled and gpu.gpu.name not in DISPLAY_ONLY
    ]
    return [*full, *_mig_devices(gpus)]


def _mig_devices(gpus: list[GpuNodes]) -> list[Device]:
    return [Device(gpu, mig) for gpu in gpus for mig in gpu.mig]


def _one(name: str, gpus: list[GpuNodes]) -> Device:
    candidates = [*(Device(gpu) for gpu in gpus), *_mig_devices(gpus)]
    old = _OLD_MIG_UUID.match(name)
    if old:
        for device in candidates:
            if device.mig is not None and _old_uuid(device) == (
                old[1].lower(),
                int(old[2]),
                int(old[3]),
            ):
                return device
    elif _INDEX.match(name) or _MIG_INDEX.match(name):
        # Without leading zeros, which no name has.
        plain = ":".join(str(int(part)) for part in name.split(":"))
        for device in candidates:
            if device.name(INDEX) == plain:
                return device
    elif _UUID.match(name):
        for device in candidates:
            if device.uuid.lower() == name.lower():
                return device
    else:
        raise RequestError(
            f'"{name}" is neither an index nor a UUID of a device',
            'list the devices with "nvidia-smi -L"',
        )
    there = ", ".join(device.name(INDEX) for device in candidates) or "none"
    raise UnresolvedDeviceError(
        f'there is no device "{name}"; devices here: {there}',
        'list the devices with "nvidia-smi -L"',
    )


def _old_uuid(device: Device) -> tuple[str, int, int]:
    assert device.mig is not None
    mig = device.mig[0]
    return device.gpu.gpu.uuid.lower(), mig.gpu_instance, mig.compute_instance
