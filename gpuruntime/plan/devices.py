# SPDX-License-Identifier: Apache-2.0
"""Device ids → the GPUs and MIG devices that they mean, and the names of each device; pure.

On the start path. An id is `all`, `none`, an index `N`, `N:M` or `N/M` for a MIG device, a UUID
`GPU-…` or `MIG-…` or the beginning of one, `MIG-GPU-…/<gi>/<ci>` of older drivers, or a PCI
address.
"""

from __future__ import annotations

import re

from cdi import names
from gpuruntime.errors import RequestError, UnresolvedDeviceError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuruntime.model import GpuNodes, LeftOutDevice, MigDevice, Node

ALL = "all"
NONE = "none"
INDEX, UUID, TYPE_INDEX = "index", "uuid", "type-index"
STRATEGIES = (INDEX, UUID, TYPE_INDEX)
# A workstation's GPU that only drives its monitors, and that no container is to compute on.
DISPLAY_ONLY = ("DGX Display", "NVIDIA DGX Display")
_INDEX = re.compile(r"[0-9]{1,9}\Z")
_MIG_INDEX = re.compile(r"([0-9]{1,9})[:/]([0-9]{1,9})\Z")
_HEX = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f][0-9a-f-]{0,35}\Z", re.IGNORECASE)
_OLD_MIG_UUID = re.compile(rf"MIG-(GPU-{_HEX})/([0-9]{{1,9}})/([0-9]{{1,9}})\Z", re.IGNORECASE)
# The domain has 4 digits, 8 as NVML has it, or is left out where it is 0.
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z", re.IGNORECASE)
_HINT = 'list the devices with "nvidia-smi -L"'
_MAX_REASONS = 4


class GpuDevice(Record):
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
        return name if names.is_device(name) else ""


def devices(
    ids: Sequence[str], gpus: Iterable[GpuNodes], left_out: Sequence[LeftOutDevice] = ()
) -> list[GpuDevice]:
    """Return the devices that *ids* mean among *gpus*, in order, each once.

    The first `all` or `none` among *ids* decides alone. Raises RequestError for a malformed id,
    and UnresolvedDeviceError for a device that does not exist or is one of *left_out*.
    """
    gpus = list(gpus)
    for name in ids:
        if name == NONE:
            return []
        if name == ALL:
            return _all(gpus)
    found: dict[str, GpuDevice] = {}
    for name in ids:
        device = _one(name, gpus, left_out)
        found.setdefault(device.name(INDEX), device)
    return list(found.values())


def _all(gpus: list[GpuNodes]) -> list[GpuDevice]:
    """Return the full GPUs that are used as such, then all MIG devices."""
    full = [
        GpuDevice(gpu)
        for gpu in gpus
        if not gpu.gpu.mig_enabled and gpu.gpu.name not in DISPLAY_ONLY
    ]
    return [*full, *_mig_devices(gpus)]


def _mig_devices(gpus: list[GpuNodes]) -> list[GpuDevice]:
    return [GpuDevice(gpu, mig) for gpu in gpus for mig in gpu.mig]


def _one(name: str, gpus: list[GpuNodes], left_out: Sequence[LeftOutDevice]) -> GpuDevice:
    candidates = [*(GpuDevice(gpu) for gpu in gpus), *_mig_devices(gpus)]
    matches = _matching(name, candidates)
    if not matches:
        raise _unresolved(name, candidates, left_out)
    if len(matches) > 1:
        several = ", ".join(f'"{device.uuid}"' for device in matches)
        raise RequestError(
            f'"{name}" is the start of several UUIDs: {several}', "write more of it"
        )
    return matches[0]


def _unresolved(
    name: str, candidates: list[GpuDevice], left_out: Sequence[LeftOutDevice]
) -> UnresolvedDeviceError:
    """Return the error for *name*, which none of *candidates* has: with the reason, if known."""
    for device in left_out:
        if is_name_of(name, device):
            what = f'the device "{_shortened(name)}" is not available'
            return UnresolvedDeviceError(f"{what}: {device}", device.hint)
    indices = ", ".join(device.name(INDEX) for device in candidates) or "none"
    message = f'there is no device "{_shortened(name)}"; devices here: {indices}'
    if left_out:
        message = f"{message}; left out: {reasons(left_out)}"
    return UnresolvedDeviceError(message, _HINT)


def is_name_of(name: str, device: LeftOutDevice) -> bool:
    """Return whether the id *name* means *device*, as far as its names are known."""
    if _INDEX.match(name) or _MIG_INDEX.match(name):
        return bool(device.name) and device.name == _plain_index(name)
    if _UUID.match(name):
        return device.uuid.lower().startswith(name.lower())
    bus_id = _bus_id(name)
    return bool(bus_id) and device.bus_id == bus_id


def reasons(left_out: Sequence[LeftOutDevice]) -> str:
    """Return why devices are left out, of many the first, for a message."""
    texts = [f"{device.title} ({device.reason})" for device in left_out[:_MAX_REASONS]]
    more = len(left_out) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def _matching(name: str, candidates: list[GpuDevice]) -> list[GpuDevice]:
    """Return those of *candidates* that *name* means; raise RequestError if it is no id."""
    if _INDEX.match(name) or _MIG_INDEX.match(name):
        plain = _plain_index(name)
        return [device for device in candidates if device.name(INDEX) == plain]
    low = name.lower()
    exact = [device for device in candidates if device.uuid and device.uuid.lower() == low]
    if exact:
        return exact[:1]
    old = _OLD_MIG_UUID.match(name)
    if old:
        wanted = old[1].lower(), int(old[2]), int(old[3])
        return [device for device in candidates if device.mig and _old_uuid(device) == wanted]
    if _UUID.match(name):
        return [device for device in candidates if device.uuid.lower().startswith(low)]
    bus_id = _bus_id(name)
    if bus_id:
        return [
            device for device in candidates if not device.mig and device.gpu.gpu.bus_id == bus_id
        ]
    raise RequestError(
        f'"{_shortened(name)}" is neither an index nor a UUID nor a PCI address of a device', _HINT
    )


def _plain_index(name: str) -> str:
    """Return the index *name* as devices spell theirs: `0:1`, without leading zeros."""
    return ":".join(str(int(part)) for part in name.replace("/", ":").split(":"))


def _bus_id(name: str) -> str:
    """Return the PCI address *name* as sysfs spells it, "" if it is not one."""
    pci = _PCI.match(name)
    return f"{int(pci[1] or '0', 16):04x}:{pci[2].lower()}" if pci else ""


def _shortened(name: str) -> str:
    # An image may have written it.
    return name if len(name) <= 64 else f"{name[:64]}..."


def _old_uuid(device: GpuDevice) -> tuple[str, int, int]:
    assert device.mig is not None
    mig = device.mig[0]
    return device.gpu.gpu.uuid.lower(), mig.gpu_instance, mig.compute_instance
