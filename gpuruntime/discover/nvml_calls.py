# SPDX-License-Identifier: Apache-2.0
"""Call NVML through pynvml, in the process that loads it.

A driver in trouble can block any call for ever. So only a child process may call it: that of
gpuruntime.discover.nvml, or that of a service.
"""

from __future__ import annotations

import ctypes
import re
import sys

from gpuruntime import remedies
from gpuruntime.discover.platforms import is_integrated_name
from gpuruntime.errors import escape
from gpuruntime.model import LeftOutDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The values of nvmlReturn_t that are handled here.
INVALID_ARGUMENT, NOT_SUPPORTED, _NOT_FOUND = 2, 3, 6
_FUNCTION_NOT_FOUND = 13
DRIVER_NOT_LOADED, DRIVER_MISMATCH = 9, 18
# Errors for a process that is not allowed to open a node, load a library or allocate memory:
# another process, under other limits, may succeed. In order: no permission, library not found,
# operating system, memory, insufficient resources, unknown.
OF_THIS_PROCESS = frozenset({4, 12, 17, 20, 23, 999})
# Errors for a query that this version of NVML, or this GPU, does not support.
NOT_HERE = (NOT_SUPPORTED, _FUNCTION_NOT_FOUND)
# The GPU is lost, must be reset, or is no longer there.
LOST = frozenset({15, 16, 28})
# The driver is gone, with all GPUs: uninitialised, not loaded.
GONE = frozenset({1, DRIVER_NOT_LOADED})
_NO_SUCH_MIG = (_NOT_FOUND, INVALID_ARGUMENT)

# nvmlBrandType_t, in order, as requirements spell it.
_BRANDS = (
    *("unknown", "quadro", "tesla", "nvs", "grid", "geforce", "titan"),
    *("nvidiavapps", "nvidiavpc", "nvidiavcs", "nvidiavws", "nvidiacloudgaming"),
    *("quadrortx", "nvidiartx", "nvidia", "geforcertx", "titanrtx"),
)
# nvmlDeviceAddressingModeType_t: the GPU uses the page tables of the processor.
_ATS = 2
# NVML documents at most 96 bytes for a name or a UUID.
_TEXT_BYTES = 4096
_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z", re.IGNORECASE)
# The most MIG devices of a GPU, for an NVML that does not report the number.
_MAX_MIG_DEVICES = 7
_UUID = re.compile(r"[!-~]{1,200}\Z")

# pynvml calls one version of each function. Of these functions, an older NVML has only an older
# version with the same arguments: the symbols to look for, newest first. pynvml initialises NVML
# without flags, as nvmlInit_v2 does.
_SYMBOLS = {
    "nvmlInitWithFlags": ("nvmlInit_v2", "nvmlInit"),
    "nvmlDeviceGetCount_v2": ("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"),
    "nvmlDeviceGetHandleByIndex_v2": (
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetHandleByIndex",
    ),
    "nvmlDeviceGetPciInfo_v3": (
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetPciInfo_v2",
        "nvmlDeviceGetPciInfo",
    ),
    "nvmlSystemGetCudaDriverVersion_v2": (
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlSystemGetCudaDriverVersion",
    ),
}


class NvmlError(Exception):
    """NVML returned the error *code*, which it describes as *text*."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Library(ctypes.CDLL):
    """A loaded NVML, in which any function may be missing."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (a function of ctypes)
        """Return the newest version of the function *name*; raise NvmlError without one."""
        symbols = _SYMBOLS.get(name, (name,))
        for symbol in symbols:
            try:
                return super().__getattr__(symbol)
            except AttributeError:
                continue
        # Not an AttributeError, from which pynvml makes an error that does not name the function.
        raise NvmlError(_FUNCTION_NOT_FOUND, f"this NVML has no {symbols[-1]}")


class Nvml:
    """The NVML at *path*, called through pynvml; errors are NvmlError."""

    def __init__(self, path: str) -> None:
        """Load the library; raise OSError."""
        # pynvml imports a function of this module and does not call it. The module itself would
        # load subprocess, tempfile and twenty more, for longer than pynvml takes.
        util = type(sys)("ctypes.util")
        util.find_library = None  # type: ignore[attr-defined]
        sys.modules.setdefault("ctypes.util", util)
        import pynvml  # noqa: PLC0415 (large: only the child imports it)

        # pynvml would load the first libnvidia-ml.so.1 on the loader's path.
        pynvml.nvmlLib = _Library(path)
        # The sizes of pynvml's buffers; a driver may have longer names than NVML documents.
        pynvml.NVML_DEVICE_NAME_V2_BUFFER_SIZE = _TEXT_BYTES
        pynvml.NVML_DEVICE_UUID_V2_BUFFER_SIZE = _TEXT_BYTES
        self._pynvml = pynvml

    def ask(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 (what pynvml returns)
        """Return what the function *name* of pynvml returns; raise NvmlError."""
        try:
            return getattr(self._pynvml, name)(*arguments)
        except self._pynvml.NVMLError as error:
            raise NvmlError(error.value, self._describe(error.value)) from None

    def text(self, name: str, *arguments: object) -> str:
        """Return the text that the function *name* returns; raise NvmlError."""
        try:
            text: str = self.ask(name, *arguments)
        except UnicodeDecodeError as error:
            text = error.object.decode("utf-8", "surrogateescape")
        return text

    def bus_id(self, device: object) -> str:
        """Return the PCI address of *device* as sysfs spells it, "" if NVML does not know it."""
        info = optional(self.ask, "nvmlDeviceGetPciInfo_v3", device)
        return bus_id_of(info) if info else ""

    def _describe(self, code: int) -> str:
        """Return the library's own description of *code*, which differs between versions."""
        try:
            return escape(self.text("nvmlErrorString", code) or "")
        except NvmlError:
            return f"code {code}"


def bus_id_of(info: Any) -> str:  # noqa: ANN401 (a structure of pynvml)
    """Return the PCI address in the nvmlPciInfo_t *info* as sysfs spells it, "" for none."""
    # An old NVML fills only the first of the two fields, with a domain of 4 digits.
    for field in ("busId", "busIdLegacy"):
        try:
            match = _BUS_ID.match(getattr(info, field))
        except UnicodeDecodeError:
            continue
        if match:
            return f"{int(match[1], 16):04x}:{match[2].lower()}"
    return ""


def address_of(handle: Any) -> int | None:  # noqa: ANN401 (a pointer of ctypes)
    """Return the address that identifies the device of *handle*, None for no device."""
    return ctypes.cast(handle, ctypes.c_void_p).value


class _Problems:
    """The devices left out and why, and whether another process would leave out the same."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.left_out: list[dict[str, str]] = []
        self.is_shared = True

    def leave_out(self, name: str, error: NvmlError, bus_id: str = "") -> None:
        """Note that the GPU or MIG device *name* is left out because of *error*."""
        hint = remedies.CHECK_NVIDIA_SMI if error.code in OF_THIS_PROCESS else remedies.RESET_GPU
        device = {"name": name, "bus_id": bus_id, "reason": str(error), "hint": hint}
        self.left_out.append(device)
        self._note(str(LeftOutDevice(**device)), error)

    def leave_out_mig_devices(self, gpu: int, error: NvmlError) -> None:
        """Note that all MIG devices of *gpu* are left out because of *error*."""
        self._note(f"the MIG devices of GPU {gpu} are left out: {error}", error)

    def _note(self, text: str, error: NvmlError) -> None:
        self.texts.append(text)
        self.is_shared = self.is_shared and error.code not in OF_THIS_PROCESS


def describe(nvml: Nvml, proc: str = "/proc") -> dict[str, Any]:
    """Return what the initialised *nvml* reports, for `nvml.answer_of`; raise NvmlError."""
    gpus: list[dict[str, Any]] = []
    problems = _Problems()
    for index in range(nvml.ask("nvmlDeviceGetCount")):
        try:
            gpus.append(_gpu(nvml, index, proc, problems))
        except NvmlError as error:
            if error.code in GONE:
                raise
            # A GPU that has fallen off the bus does not affect the others.
            problems.leave_out(str(index), error, _bus_id_of_failed(nvml, index))
    return {
        "driver_version": unless_error(nvml.text, "nvmlSystemGetDriverVersion") or None,
        "cuda_version": _cuda_version(nvml),
        "gpus": gpus,
        "problems": problems.texts,
        "left_out": problems.left_out,
        "is_shared": problems.is_shared,
    }


def _bus_id_of_failed(nvml: Nvml, index: int) -> str:
    """Return the PCI address of a GPU that failed, "" if NVML does not return it."""
    device = unless_error(nvml.ask, "nvmlDeviceGetHandleByIndex", index)
    return "" if device is None else unless_error(nvml.bus_id, device) or ""


def _cuda_version(nvml: Nvml) -> str:
    """Return the newest version of CUDA that the driver runs, "" if NVML does not tell."""
    number = unless_error(nvml.ask, "nvmlSystemGetCudaDriverVersion_v2")
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _gpu(nvml: Nvml, index: int, proc: str, problems: _Problems) -> dict[str, Any]:
    """Return what there is to know of one GPU; raise NvmlError if it cannot be used."""
    device = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    uuid = _uuid(nvml, device, f"GPU {index}", problems)
    bus_id = nvml.bus_id(device)
    name = optional(nvml.text, "nvmlDeviceGetName", device) or ""
    gpu: dict[str, Any] = {
        "index": index,
        "uuid": uuid,
        "minor": _minor(nvml, device, bus_id, proc, name),
        "name": name,
        "bus_id": bus_id,
        "architecture": _architecture(nvml, device),
        "brand": _brand(nvml, device),
        **_memory(nvml, device),
        "mig_enabled": False,
        "mig_devices": [],
    }
    mode = optional(nvml.ask, "nvmlDeviceGetMigMode", device)
    if mode and mode[0]:
        gpu["mig_enabled"] = True
        gpu["mig_devices"] = _mig_devices(nvml, device, index, problems)
    return gpu


def _mig_devices(
    nvml: Nvml, device: object, gpu: int, problems: _Problems
) -> list[dict[str, Any]]:
    mig_devices = []
    count = optional(nvml.ask, "nvmlDeviceGetMaxMigDeviceCount", device)
    for index in range(_MAX_MIG_DEVICES if count is None else count):
        name = f"{gpu}:{index}"
        try:
            mig = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
        except NvmlError as error:
            if error.code in NOT_HERE:
                problems.leave_out_mig_devices(gpu, error)
                break
            if error.code not in _NO_SUCH_MIG:
                problems.leave_out(name, error)
            continue
        try:
            mig_devices.append(
                {
                    "index": index,
                    "uuid": _uuid(nvml, mig, f"MIG device {name}", problems),
                    "gpu_instance": nvml.ask("nvmlDeviceGetGpuInstanceId", mig),
                    "compute_instance": nvml.ask("nvmlDeviceGetComputeInstanceId", mig),
                }
            )
        except NvmlError as error:
            problems.leave_out(name, error)
    return mig_devices


def optional(ask: Any, *arguments: object) -> Any:  # noqa: ANN401 (what *ask* returns)
    """Return what *ask* returns, None if NVML does not support it; raise NvmlError."""
    try:
        return ask(*arguments)
    except NvmlError as error:
        if error.code not in NOT_HERE:
            raise
        return None


def unless_error(ask: Any, *arguments: object) -> Any:  # noqa: ANN401 (what *ask* returns)
    """Return what *ask* returns, None for any error: for data that a container can do without."""
    try:
        return ask(*arguments)
    except NvmlError:
        return None


def _architecture(nvml: Nvml, device: object) -> str:
    """Return the compute capability, "" if NVML does not report it."""
    capability = unless_error(nvml.ask, "nvmlDeviceGetCudaComputeCapability", device)
    return "{}.{}".format(*capability) if capability else ""


def _brand(nvml: Nvml, device: object) -> str:
    """Return the brand as requirements spell it, "" if NVML does not report it."""
    number = unless_error(nvml.ask, "nvmlDeviceGetBrand", device)
    if number is None:
        return ""
    return _BRANDS[number] if number < len(_BRANDS) else _BRANDS[0]


def _memory(nvml: Nvml, device: object) -> dict[str, Any]:
    """Return whether the GPU shares page tables with the processor, and its NUMA node if so."""
    if unless_error(nvml.ask, "nvmlDeviceGetAddressingMode", device) != _ATS:
        return {"coherent": False, "memory_node": -1}
    node = unless_error(nvml.ask, "nvmlDeviceGetNumaNodeId", device)
    return {"coherent": True, "memory_node": -1 if node is None else node}


def _uuid(nvml: Nvml, device: object, subject: str, problems: _Problems) -> str:
    """Return the UUID, "" if it is missing or cannot be a name; raise NvmlError."""
    uuid: str = optional(nvml.text, "nvmlDeviceGetUUID", device) or ""
    if uuid and not _UUID.match(uuid):
        problems.texts.append(f'{subject} has no name by its UUID, which is "{escape(uuid)}"')
        return ""
    return uuid


def _minor(nvml: Nvml, device: object, bus_id: str, proc: str, name: str) -> int:
    """Return the minor of the GPU's node, from the kernel if NVML does not report it.

    The integrated GPU of a Tegra, known by its *name*, has no node of its own: 0.
    """
    try:
        return int(nvml.ask("nvmlDeviceGetMinorNumber", device))
    except NvmlError as error:
        if error.code in NOT_HERE and not bus_id and is_integrated_name(name):
            return 0
        if error.code not in NOT_HERE or not bus_id:
            raise
        try:
            with open(f"{proc}/driver/nvidia/gpus/{bus_id}/information", "rb") as stream:
                information = stream.read(1 << 16)
        except OSError:
            raise error from None
        match = re.search(rb"^Device Minor:\s*([0-9]{1,7})\s*$", information, re.MULTILINE)
        if match is None:
            raise
        return int(match[1])
