# SPDX-License-Identifier: Apache-2.0
"""The calls of NVML that read and change MIG layouts, in the process that has loaded it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpunode import pod_processes
from gpuruntime.discover import nvml_calls
from gpuruntime.discover.nvml_calls import Nvml, NvmlError

# The numbers of profiles that are tried: a newer NVML has more than pynvml has names for.
_PROFILE_NUMBERS = range(32)
_COMPUTE_NUMBERS = range(16)
# An NVML that does not have this version of a structure.
_OTHER_VERSION = frozenset({nvml_calls.INVALID_ARGUMENT, 13, 25})
_ABSENT = frozenset({nvml_calls.INVALID_ARGUMENT, nvml_calls.NOT_SUPPORTED})
_MOST_INSTANCES = 16
_MOST_PLACEMENTS = 64
_PROFILE = re.compile(r"[0-9]g\.[0-9]+gb(?:[+-][a-z.,]+)*")


class _ProfileInfo(ctypes.Structure):
    """nvmlGpuInstanceProfileInfo_v3_t, which pynvml does not have."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("sliceCount", ctypes.c_uint),
        ("instanceCount", ctypes.c_uint),
        *((name, ctypes.c_uint) for name in ("multiprocessors", "copy", "decoders", "encoders")),
        *((name, ctypes.c_uint) for name in ("jpegs", "ofas")),
        ("memorySizeMB", ctypes.c_ulonglong),
        ("name", ctypes.c_char * 96),
        ("capabilities", ctypes.c_uint),
    )


_PROFILE_INFO_VERSION = ctypes.sizeof(_ProfileInfo) | 3 << 24


class _Holder(NamedTuple):
    """A process, in words, and the instance that it uses."""

    gpu_instance: int
    compute_instance: int
    name: str


class Operations:
    """The changes that a parent may request, by name; errors are NvmlError."""

    def __init__(self, library: str) -> None:
        """Load *library*; raise OSError or NvmlError."""
        self._nvml = Nvml(library)
        self._nvml.ask("nvmlInit")

    def state(self) -> list[dict[str, Any]]:
        """Return what each GPU has: identity, mode, profiles and instances with their holders."""
        gpus = []
        for index in range(self._nvml.ask("nvmlDeviceGetCount")):
            try:
                gpus.append(self._gpu(index))
            except NvmlError as error:
                gpus.append({"index": index, "error": str(error)})
        return gpus

    def set_mode(self, gpu: int, *, enabled: bool) -> None:
        """Set the MIG mode of the GPU *gpu*, which may then wait for a reset."""
        self._nvml.ask("nvmlDeviceSetMigMode", self._device(gpu), int(enabled))

    def create_gpu_instance(self, gpu: int, profile: str, start: int) -> int:
        """Create a GPU instance at the memory slice *start*, and return its id."""
        device = self._device(gpu)
        one = next((each for each in self._profiles(device, gpu) if each["name"] == profile), None)
        if one is None:
            raise NvmlError(nvml_calls.NOT_SUPPORTED, f"the GPU has no profile {profile}")
        placement = self._structure("c_nvmlGpuInstancePlacement_t")(start, one["size"])
        instance = self._nvml.ask(
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            *(device, one["id"], ctypes.byref(placement)),
        )
        return int(self._nvml.ask("nvmlGpuInstanceGetInfo", instance).id)

    def create_compute_instance(self, gpu: int, instance: int, slices: int) -> None:
        """Create a compute instance of *slices* in the GPU instance *instance*."""
        handle = self._instance(gpu, instance)
        for one in self._compute_profiles(handle):
            if one.sliceCount == slices:
                self._nvml.ask("nvmlGpuInstanceCreateComputeInstance", handle, one.id)
                return
        raise NvmlError(
            nvml_calls.NOT_SUPPORTED, f"the instance has no compute profile of {slices} slices"
        )

    def destroy_compute_instance(self, gpu: int, instance: int, compute: int) -> None:
        """Destroy the compute instance *compute* of the GPU instance *instance*."""
        handle = self._nvml.ask(
            "nvmlGpuInstanceGetComputeInstanceById", self._instance(gpu, instance), compute
        )
        self._nvml.ask("nvmlComputeInstanceDestroy", handle)

    def destroy_gpu_instance(self, gpu: int, instance: int) -> None:
        """Destroy the GPU instance *instance*."""
        self._nvml.ask("nvmlGpuInstanceDestroy", self._instance(gpu, instance))

    def _structure(self, name: str) -> Any:  # noqa: ANN401 (a class of pynvml)
        import pynvml  # noqa: PLC0415 (large: only this process imports it)

        return getattr(pynvml, name)

    def _device(self, gpu: int) -> Any:  # noqa: ANN401 (a handle)
        return self._nvml.ask("nvmlDeviceGetHandleByIndex", gpu)

    def _instance(self, gpu: int, instance: int) -> Any:  # noqa: ANN401 (a handle)
        return self._nvml.ask("nvmlDeviceGetGpuInstanceById", self._device(gpu), instance)

    def _gpu(self, index: int) -> dict[str, Any]:
        device = self._device(index)
        mode = nvml_calls.optional(self._nvml.ask, "nvmlDeviceGetMigMode", device)
        info = self._nvml.ask("nvmlDeviceGetPciInfo_v3", device)
        gpu: dict[str, Any] = {
            "index": index,
            "uuid": self._nvml.text("nvmlDeviceGetUUID", device),
            "name": nvml_calls.optional(self._nvml.text, "nvmlDeviceGetName", device) or "",
            "bus_id": nvml_calls.bus_id_of(info),
            "device_id": f"0x{info.pciDeviceId:08X}",
            "subsystem_id": f"0x{info.pciSubSystemId:08X}",
            "mode": None if mode is None else bool(mode[0]),
            "pending": None if mode is None else bool(mode[1]),
            "profiles": [],
            "instances": [],
            "holders": [],
        }
        if mode is None:
            return gpu
        holders = self._holders(device)
        gpu["profiles"] = self._profiles(device, index)
        if mode[0]:
            gpu["instances"] = self._instances(device, gpu["profiles"], holders)
        gpu["holders"] = sorted({one.name for one in holders})
        return gpu

    def _profiles(self, device: object, index: int) -> list[dict[str, Any]]:
        profiles = []
        for number in _PROFILE_NUMBERS:
            try:
                info = self._profile_info(device, number)
            except NvmlError as error:
                if error.code in _ABSENT:
                    continue
                raise NvmlError(error.code, f"profile {number} of GPU {index}: {error}") from None
            match = _PROFILE.search(_text(info.name))
            starts, size = self._placements(device, info.id)
            profiles.append(
                {
                    "id": info.id,
                    "name": match[0] if match else f"{info.sliceCount}g.profile{info.id}",
                    "slices": info.sliceCount,
                    "limit": info.instanceCount,
                    "starts": starts,
                    "size": size,
                }
            )
        return profiles

    def _profile_info(self, device: object, number: int) -> Any:  # noqa: ANN401 (a structure)
        """Return what NVML says of a profile, by the newest structure that it has."""
        info = _ProfileInfo(_PROFILE_INFO_VERSION)
        try:
            function = self._nvml.ask(
                "_nvmlGetFunctionPointer", "nvmlDeviceGetGpuInstanceProfileInfoV"
            )
            self._nvml.ask("_nvmlCheckReturn", function(device, number, ctypes.byref(info)))
        except NvmlError as error:
            if error.code not in _OTHER_VERSION:
                raise
            return self._nvml.ask("nvmlDeviceGetGpuInstanceProfileInfo", device, number)
        return info

    def _placements(self, device: object, profile: int) -> tuple[list[int], int]:
        """Return the first slices and the size; without MIG mode, NVML reports none."""
        placements = (self._structure("c_nvmlGpuInstancePlacement_t") * _MOST_PLACEMENTS)()
        count = ctypes.c_uint(_MOST_PLACEMENTS)
        try:
            self._nvml.ask(
                "nvmlDeviceGetGpuInstancePossiblePlacements",
                *(device, profile, placements, ctypes.byref(count)),
            )
        except NvmlError as error:
            if error.code not in _ABSENT:
                raise
            return [], 0
        used = placements[: count.value]
        return [one.start for one in used], used[0].size if used else 0

    def _instances(
        self, device: object, profiles: list[dict[str, Any]], holders: list[_Holder]
    ) -> list[dict[str, Any]]:
        instances = []
        for profile in profiles:
            handles = (self._structure("c_nvmlGpuInstance_t") * _MOST_INSTANCES)()
            count = ctypes.c_uint(_MOST_INSTANCES)
            self._nvml.ask(
                "nvmlDeviceGetGpuInstances", device, profile["id"], handles, ctypes.byref(count)
            )
            for handle in list(handles)[: count.value]:
                info = self._nvml.ask("nvmlGpuInstanceGetInfo", handle)
                instances.append(
                    {
                        "id": info.id,
                        "profile": profile["name"],
                        "start": info.placement.start,
                        "size": info.placement.size,
                        "compute": self._computes(handle, info.id, holders),
                    }
                )
        return instances

    def _computes(self, handle: object, instance: int, holders: list[_Holder]) -> list[Any]:
        computes = []
        for profile in self._compute_profiles(handle):
            handles = (self._structure("c_nvmlComputeInstance_t") * _MOST_INSTANCES)()
            count = ctypes.c_uint(_MOST_INSTANCES)
            self._nvml.ask(
                "nvmlGpuInstanceGetComputeInstances",
                *(handle, profile.id, handles, ctypes.byref(count)),
            )
            for compute in list(handles)[: count.value]:
                number = self._nvml.ask("nvmlComputeInstanceGetInfo", compute).id
                names = {
                    one.name
                    for one in holders
                    if (one.gpu_instance, one.compute_instance) == (instance, number)
                }
                computes.append(
                    {"id": number, "slices": profile.sliceCount, "holders": sorted(names)}
                )
        return computes

    def _compute_profiles(self, handle: object) -> list[Any]:
        profiles: dict[int, Any] = {}
        for number in _COMPUTE_NUMBERS:
            try:
                info = self._nvml.ask(
                    "nvmlGpuInstanceGetComputeInstanceProfileInfo", handle, number, 0, 1
                )
            except NvmlError as error:
                if error.code in _ABSENT:
                    continue
                raise
            profiles.setdefault(info.id, info)
        return list(profiles.values())

    def _holders(self, device: object) -> list[_Holder]:
        processes: list[Any] = []
        for name in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        ):
            processes += nvml_calls.optional(self._nvml.ask, name, device) or []
        pods = pod_processes.pods_by_uid() if processes else {}
        return [
            _Holder(one.gpuInstanceId, one.computeInstanceId, holder_name(one.pid, pods))
            for one in processes
        ]


def _text(name: bytes | str) -> str:
    return name.decode("ascii", "replace") if isinstance(name, bytes) else name


def holder_name(pid: int, pods: Mapping[str, tuple[str, str]], proc: str = "/proc") -> str:
    """Return the process *pid* in words, with its pod if it is in one."""
    try:
        with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            program = f" ({stream.read(64).strip()})"
    except OSError:
        program = ""
    uid = pod_processes.pod_of(pid, proc)
    pod = f" of the pod {'/'.join(pods.get(uid, (uid,)))}" if uid else ""
    return f"process {pid}{program}{pod}"
