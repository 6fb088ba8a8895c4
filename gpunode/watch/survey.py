# SPDX-License-Identifier: Apache-2.0
"""What the child asks NVML and sysfs about the GPUs, as plain values for the pipe.

A GPU that fails a query lacks what the query is about; it does not affect the others.
"""

from __future__ import annotations

from gpunode import mig_profiles
from gpuruntime.discover.nvml_calls import (
    INVALID_ARGUMENT,
    NOT_HERE,
    NvmlError,
    bus_id_of,
    optional,
    unless_error,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuruntime.discover.nvml_calls import Nvml

_MIB = 1 << 20
_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive-process"}
# nvmlGpuTopologyLevel_t → model.Topology.
_TOPOLOGY = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}
_TO_GPU, _TO_SWITCH = 0, 2
_FABRIC_COMPLETED = 3
_MAX_LINKS = 36
# NVML_GPU_INSTANCE_PROFILE_* → the attributes of its MIG devices, added and removed.
_ATTRIBUTES: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    0x7: (("me",), ()),  # 1_SLICE_REV1
    0x8: (("me",), ()),  # 2_SLICE_REV1
    0xA: (("gfx",), ()),
    0xB: (("gfx",), ()),
    0xC: (("gfx",), ()),
    0xD: ((), ("me",)),
    0xE: ((), ("me",)),
    0xF: (("me.all",), ()),
    0x10: (("me.all",), ()),
    0x11: (("gfx",), ()),
}


def node_gpu(nvml: Nvml, gpu: dict[str, Any], sys: str, problems: list[str]) -> dict[str, Any]:
    """Return the values of a model.NodeGpu for *gpu*, which is an item of `nvml_calls.describe`.

    MIG devices without a size are left out, with a sentence in *problems*. Raises NvmlError if
    the GPU is lost.
    """
    device = nvml.ask("nvmlDeviceGetHandleByIndex", gpu["index"])
    memory = unless_error(nvml.ask, "nvmlDeviceGetMemoryInfo", device)
    mode = unless_error(nvml.ask, "nvmlDeviceGetMigMode", device)
    pci = unless_error(nvml.ask, "nvmlDeviceGetPciInfo_v3", device)
    compute_mode = unless_error(nvml.ask, "nvmlDeviceGetComputeMode", device)
    cluster_uuid, clique_id = _fabric(nvml, device)
    memory_mib = memory.total // _MIB if memory else None
    return {
        "gpu": gpu,
        "memory_mib": memory_mib,
        "numa_node": numa_node(sys, gpu["bus_id"]),
        "mig_capable": mode is not None,
        "mig_pending": bool(mode[1]) if mode and mode[0] != mode[1] else None,
        "mig_devices": _mig_devices(nvml, device, gpu, memory_mib, problems),
        "device_id": f"0x{pci.pciDeviceId:08X}" if pci else "",
        "subsystem_id": f"0x{pci.pciSubSystemId:08X}" if pci else "",
        "compute_mode": _COMPUTE_MODES.get(compute_mode, ""),
        "cluster_uuid": cluster_uuid,
        "clique_id": clique_id,
    }


def numa_node(sys: str, bus_id: str) -> int | None:
    """Return the NUMA node of the PCI device *bus_id*; None if sysfs at *sys* has none."""
    try:
        with open(f"{sys}/bus/pci/devices/{bus_id}/numa_node", encoding="ascii") as stream:
            node = int(stream.read(32))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _fabric(nvml: Nvml, device: object) -> tuple[str, int | None]:
    """Return the UUID of the NVLink cluster and the clique, ("", None) outside of a fabric."""
    import pynvml  # noqa: PLC0415 (the child has loaded it)

    info = pynvml.c_nvmlGpuFabricInfo_t()
    try:
        nvml.ask("nvmlDeviceGetGpuFabricInfo", device, pynvml.byref(info))
    except NvmlError:
        return "", None
    uuid = bytes(info.clusterUuid).hex()
    if info.state != _FABRIC_COMPLETED or info.status != 0 or not uuid.strip("0"):
        return "", None
    parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
    return "-".join(parts), info.cliqueId


def _mig_devices(
    nvml: Nvml,
    device: object,
    gpu: dict[str, Any],
    memory_mib: int | None,
    problems: list[str],
) -> list[dict[str, Any]]:
    by_id = _attributes_by_id(nvml, device) if gpu["mig_devices"] else {}
    devices = []
    for mig in gpu["mig_devices"]:
        try:
            handle = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, mig["index"])
            size = nvml.ask("nvmlDeviceGetAttributes_v2", handle)
            instance = _instance(nvml, device, mig["gpu_instance"])
            added, removed = by_id.get(instance.profileId if instance else -1, ((), ()))
            profile = mig_profiles.of_sizes(
                compute_slices=size.computeInstanceSliceCount,
                gpu_slices=size.gpuInstanceSliceCount,
                memory_mib=size.memorySizeMB,
                gpu_memory_mib=memory_mib or 0,
                added=added,
                removed=removed,
            )
        except (NvmlError, ValueError) as error:
            name = f"{gpu['index']}:{mig['index']}"
            problems.append(f"MIG device {name} is left out, because its size is unknown: {error}")
            continue
        devices.append(
            {
                "device": mig,
                "attributes": {
                    "profile": str(profile),
                    "gpu_slices": size.gpuInstanceSliceCount,
                    "compute_slices": size.computeInstanceSliceCount,
                    "memory_mib": size.memorySizeMB,
                    "start": instance.placement.start if instance else None,
                    "size": instance.placement.size if instance else None,
                    "multiprocessors": size.multiprocessorCount,
                    "copy_engines": size.sharedCopyEngineCount,
                    "decoders": size.sharedDecoderCount,
                    "encoders": size.sharedEncoderCount,
                    "jpeg_engines": size.sharedJpegCount,
                    "ofa_engines": size.sharedOfaCount,
                },
            }
        )
    return devices


def _instance(nvml: Nvml, device: object, number: int) -> Any:  # noqa: ANN401 (of pynvml)
    """Return the placement and profile of a GPU instance, None if NVML does not report them."""
    handle = unless_error(nvml.ask, "nvmlDeviceGetGpuInstanceById", device, number)
    return None if handle is None else unless_error(nvml.ask, "nvmlGpuInstanceGetInfo", handle)


def _attributes_by_id(
    nvml: Nvml, device: object
) -> dict[int, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the attributes of the profiles that have some, by the driver's profile id."""
    by_id = {}
    for profile, attributes in _ATTRIBUTES.items():
        info = unless_error(nvml.ask, "nvmlDeviceGetGpuInstanceProfileInfo", device, profile, 1)
        if info is not None:
            by_id[info.id] = attributes
    return by_id


def links(
    nvml: Nvml, gpus: Sequence[dict[str, Any]], problems: list[str]
) -> list[tuple[str, str, int, int]]:
    """Return (UUID, UUID, topology, NVLinks) for each ordered pair of *gpus* that answer.

    Where the two directions differ, the lower number of NVLinks counts, with a sentence in
    *problems*.
    """
    ends = {}
    for gpu in gpus:
        try:
            ends[gpu["index"]] = _nvlinks(nvml, _handle(nvml, gpu))
        except NvmlError as error:
            problems.append(f"the links of GPU {gpu['index']} are unknown: {error}")
    rows = []
    for first in gpus:
        for second in gpus:
            pair = first["index"], second["index"]
            if pair[0] >= pair[1] or pair[0] not in ends or pair[1] not in ends:
                continue
            there = ends[pair[0]].get(second["bus_id"], 0)
            back = ends[pair[1]].get(first["bus_id"], 0)
            if there != back:
                problems.append(
                    f"GPU {pair[0]} reports {there} NVLinks to GPU {pair[1]}, which reports "
                    f"{back}: the lower number is used"
                )
            # GPUs at the same NVSwitches reach each other by all of their links to them.
            switched = min(ends[pair[0]].get("", 0), ends[pair[1]].get("", 0))
            nvlinks = min(there, back) or switched
            topology = _topology(nvml, first, second)
            rows.append((first["uuid"], second["uuid"], topology, nvlinks))
            rows.append((second["uuid"], first["uuid"], topology, nvlinks))
    return rows


def _handle(nvml: Nvml, gpu: dict[str, Any]) -> object:
    return nvml.ask("nvmlDeviceGetHandleByIndex", gpu["index"])


def _topology(nvml: Nvml, first: dict[str, Any], second: dict[str, Any]) -> int:
    try:
        level = nvml.ask(
            "nvmlDeviceGetTopologyCommonAncestor", _handle(nvml, first), _handle(nvml, second)
        )
    except NvmlError:
        return 0
    return _TOPOLOGY.get(level, 0)


def _nvlinks(nvml: Nvml, device: object) -> dict[str, int]:
    """Return the number of active NVLinks by the PCI address at the other end, "" for NVSwitches.

    Raises NvmlError, but not for a GPU without NVLink.
    """
    counts: dict[str, int] = {}
    for link in range(_MAX_LINKS):
        try:
            if not nvml.ask("nvmlDeviceGetNvLinkState", device, link):
                continue
            end = _link_end(nvml, device, link)
        except NvmlError as error:
            if error.code == INVALID_ARGUMENT:
                break
            if error.code not in NOT_HERE:
                raise
            continue
        if end is not None:
            counts[end] = counts.get(end, 0) + 1
    return counts


def _link_end(nvml: Nvml, device: object, link: int) -> str | None:
    kind = optional(nvml.ask, "nvmlDeviceGetNvLinkRemoteDeviceType", device, link)
    if kind == _TO_SWITCH:
        return ""
    if kind not in (None, _TO_GPU):
        return None
    return bus_id_of(nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", device, link))
