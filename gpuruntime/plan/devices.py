# SPDX-License-Identifier: Apache-2.0
"""Resolve device ids to GPUs and MIG devices, and name each device; pure.

On the start path. An id is `all`, `none`, an index `N`, `N:M` or `N/M` for a MIG device, a UUID
`GPU-…` or `MIG-…` or a prefix of one, `MIG-GPU-…/<gi>/<ci>` of older drivers, or a PCI
address.
"""

from __future__ import annotations

from cdi import names
from gpuruntime.errors import RequestError, UnresolvedDeviceError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Sequence

    from gpuruntime.model import GpuNodes, LeftOutDevice, MigDevice, Node

ALL = "all"
NONE = "none"
INDEX, UUID, TYPE_INDEX = "index", "uuid", "type-index"
STRATEGIES = (INDEX, UUID, TYPE_INDEX)
# The GPU of a workstation that only drives its monitors; `all` does not include it.
DISPLAY_ONLY = ("DGX Display", "NVIDIA DGX Display")
_MAX_DIGITS = 9
_MAX_INDICES = 2
# Case is ignored in these.
_HEX = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_UUID = r"(?:GPU|MIG)-[0-9a-f][0-9a-f-]{0,35}\Z"
_OLD_MIG_UUID = rf"MIG-(GPU-{_HEX})/([0-9]{{1,9}})/([0-9]{{1,9}})\Z"
# The domain has 4 digits, or 8 in NVML's form; it may be omitted if it is 0.
_PCI = r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z"
_HINT = 'list the devices with "nvidia-smi -L"'
_MAX_REASONS = 4


class GpuDevice(Record):
    """A full GPU, or its MIG device *mig*: (device, GPU instance node, compute instance node)."""

    __slots__ = ("gpu", "mig")

    def __init__(self, gpu: GpuNodes, mig: tuple[MigDevice, Node, Node] | None = None) -> None:
        self.gpu = gpu
        self.mig = mig

    @property
    def uuid(self) -> str:
        """The UUID of the device, "" if the driver does not report one."""
        return self.gpu.gpu.uuid if self.mig is None else self.mig[0].uuid

    def name(self, strategy: str) -> str:
        """Return the name of the device by *strategy*, "" if that is not a valid CDI device name.

        Drivers before 470 use slashes in the UUIDs of MIG devices.
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
    """Return the devices of *gpus* that *ids* select, in order, each once.

    If *ids* contain `all` or `none`, the first of these overrides every other id. Raises
    RequestError for a malformed id, and UnresolvedDeviceError for a device that does not exist or
    is one of *left_out*.
    """
    gpus = list(gpus)
    for name in ids:
        if name == NONE:
            return []
        if name == ALL:
            return _all(gpus)
    selected: dict[str, GpuDevice] = {}
    for name in ids:
        device = _one(name, gpus, left_out)
        selected.setdefault(device.name(INDEX), device)
    return list(selected.values())


def _all(gpus: list[GpuNodes]) -> list[GpuDevice]:
    """Return all full GPUs that are not in MIG mode or display-only, then all MIG devices."""
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
        uuids = ", ".join(f'"{device.uuid}"' for device in matches)
        raise RequestError(
            f'"{name}" is a prefix of several UUIDs: {uuids}', "use a longer prefix"
        )
    return matches[0]


def _unresolved(
    name: str, candidates: list[GpuDevice], left_out: Sequence[LeftOutDevice]
) -> UnresolvedDeviceError:
    """Return the error for *name*, which matches no candidate, with the reason if known."""
    for device in left_out:
        if is_name_of(name, device):
            problem = f'the device "{_shortened(name)}" is not available'
            return UnresolvedDeviceError(f"{problem}: {device}", device.hint)
    indices = ", ".join(device.name(INDEX) for device in candidates) or "none"
    message = f'there is no device "{_shortened(name)}"; available devices: {indices}'
    if left_out:
        message = f"{message}; left out: {reasons(left_out)}"
    return UnresolvedDeviceError(message, _HINT)


def is_name_of(name: str, device: LeftOutDevice) -> bool:
    """Return whether the id *name* selects *device*, as far as the names of *device* are known."""
    if _is_index(name):
        return bool(device.name) and device.name == _plain_index(name)
    if _match(_UUID, name):
        return device.uuid.lower().startswith(name.lower())
    bus_id = _bus_id(name)
    return bool(bus_id) and device.bus_id == bus_id


def reasons(left_out: Sequence[LeftOutDevice]) -> str:
    """Return, for a message, why devices are left out; of many devices only the first."""
    texts = [f"{device.title} ({device.reason})" for device in left_out[:_MAX_REASONS]]
    remaining = len(left_out) - len(texts)
    return ", ".join(texts) + (f" and {remaining} more" if remaining else "")


def _matching(name: str, candidates: list[GpuDevice]) -> list[GpuDevice]:
    """Return the *candidates* that *name* selects; raise RequestError if it is not a valid id."""
    if _is_index(name):
        index = _plain_index(name)
        return [device for device in candidates if device.name(INDEX) == index]
    lower_name = name.lower()
    exact = [device for device in candidates if device.uuid and device.uuid.lower() == lower_name]
    if exact:
        return exact[:1]
    old_mig_uuid = _match(_OLD_MIG_UUID, name)
    if old_mig_uuid:
        mig_address = old_mig_uuid[1].lower(), int(old_mig_uuid[2]), int(old_mig_uuid[3])
        return [device for device in candidates if device.mig and _old_uuid(device) == mig_address]
    if _match(_UUID, name):
        return [device for device in candidates if device.uuid.lower().startswith(lower_name)]
    bus_id = _bus_id(name)
    if bus_id:
        return [
            device for device in candidates if not device.mig and device.gpu.gpu.bus_id == bus_id
        ]
    raise RequestError(
        f'"{_shortened(name)}" is neither an index nor a UUID nor a PCI address of a device', _HINT
    )


def _is_index(name: str) -> bool:
    """Return whether *name* is an index, or that of a MIG device."""
    parts = name.replace("/", ":").split(":")
    return len(parts) <= _MAX_INDICES and all(
        part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS for part in parts
    )


def _match(pattern: str, name: str) -> re.Match[str] | None:
    """Return the match of *pattern* with *name*, in upper or lower case."""
    # Most requests name devices by index or ask for all; this import costs a Python start.
    import re  # noqa: PLC0415

    return re.match(pattern, name, re.IGNORECASE)


def _plain_index(name: str) -> str:
    """Return the index *name* in canonical form: `0:1`, without leading zeros."""
    return ":".join(str(int(part)) for part in name.replace("/", ":").split(":"))


def _bus_id(name: str) -> str:
    """Return the PCI address *name* in the form of sysfs, "" if *name* is not a PCI address."""
    pci = _match(_PCI, name)
    return f"{int(pci[1] or '0', 16):04x}:{pci[2].lower()}" if pci else ""


def _shortened(name: str) -> str:
    # The name may come from an image and have any length.
    return name if len(name) <= 64 else f"{name[:64]}..."


def _old_uuid(device: GpuDevice) -> tuple[str, int, int]:
    assert device.mig is not None
    mig = device.mig[0]
    return device.gpu.gpu.uuid.lower(), mig.gpu_instance, mig.compute_instance
