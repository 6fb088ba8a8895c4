# SPDX-License-Identifier: Apache-2.0
"""Ask NVML about the GPUs, in a child process with a deadline.

A driver in trouble can block NVML for ever, in a state that no signal ends. So a child process
opens the library by path and calls it through pynvml, and a child that does not answer is
abandoned. The child is forked, which costs less than to start another interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import time
from typing import Any

from gpuruntime import child_process, remedies
from gpuruntime.errors import DriverError, escape
from gpuruntime.formats.driver_version import of_module_text, of_name
from gpuruntime.model import Gpu, LeftOutDevice, MigDevice
from gpuruntime.record import Record

DEADLINE_S = 30.0
# A process that sleeps in the kernel without a break for this long before the deadline waits for
# the driver. The kernel throttles a process above memory.high for less time than this.
_WATCH_S = 3.0
# For a short deadline: this fraction of it.
_WATCHED_PART = 0.25
# The interval at which the process is observed in that time.
_LOOK_S = 0.05
_ANSWER_BYTES = 8 << 20

# The values of nvmlReturn_t that are handled here.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND = 2, 3, 6
_FUNCTION_NOT_FOUND = 13
_DRIVER_NOT_LOADED, _DRIVER_MISMATCH = 9, 18
# Errors for a process that is not allowed to open a node, load a library or allocate memory:
# another process, under other limits, may succeed. In order: no permission, library not found,
# operating system, memory, insufficient resources, unknown.
_OF_THIS_PROCESS = frozenset({4, 12, 17, 20, 23, 999})
# Errors for a query that this version of NVML, or this GPU, does not support.
_NOT_HERE = (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND)
_NO_SUCH_MIG = (_NOT_FOUND, _INVALID_ARGUMENT)

# nvmlBrandType_t, in order, as requirements spell it.
_BRANDS = (
    *("unknown", "quadro", "tesla", "nvs", "grid", "geforce", "titan"),
    *("nvidiavapps", "nvidiavpc", "nvidiavcs", "nvidiavws", "nvidiacloudgaming"),
    *("quadrortx", "nvidiartx", "nvidia", "geforcertx", "titanrtx"),
)
# NVML documents at most 96 bytes for a name or a UUID.
_TEXT_BYTES = 4096
_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z", re.IGNORECASE)
# The most MIG devices of a GPU, for an NVML that does not report the number.
_MAX_MIG_DEVICES = 7
_UUID = re.compile(r"[!-~]{1,200}\Z")


class NoAnswerError(DriverError):
    """The query failed for a reason that may not affect other processes.

    The library could not be loaded, the child was killed or got no CPU time, or its resource
    limits are too low.
    """


class Answer(Record):
    """What NVML reports: the driver's versions, the GPUs, the devices that are left out.

    *problems* are sentences about *left_out*, and about GPUs that lack something.
    *is_shared* says whether another process would get the same answer.
    """

    __slots__ = ("cuda_version", "driver_version", "gpus", "is_shared", "left_out", "problems")

    def __init__(
        self,
        driver_version: str | None,
        cuda_version: str,
        gpus: tuple[Gpu, ...],
        problems: tuple[str, ...],
        *,
        left_out: tuple[LeftOutDevice, ...] = (),
        is_shared: bool = True,
    ) -> None:
        self.driver_version = driver_version
        self.cuda_version = cuda_version
        self.gpus = gpus
        self.problems = problems
        self.left_out = left_out
        self.is_shared = is_shared


def query(library: str, deadline_s: float = DEADLINE_S, *, proc: str = "/proc") -> Answer:
    """Return the answer of the NVML at the host path *library* (see also `nvidia-smi -L`).

    Call it only in a process with one thread. Raises DriverError if NVML returns an error, or does
    not return in *deadline_s* seconds; its subclass NoAnswerError if the library cannot be loaded,
    or if this process's own limits may be the cause.
    """
    end = time.monotonic() + deadline_s
    try:
        child = child_process.fork(lambda writer: _be_child(writer, library, deadline_s, proc))
    except OSError as error:
        raise NoAnswerError(
            f'cannot start the process that calls "{library}": {error.strerror}',
            "end other processes, or raise the limit on their number",
        ) from error
    watch = _SleepWatch(child.pid, end - min(_WATCH_S, deadline_s * _WATCHED_PART), end)
    outcome = child.finish(deadline_s, _ANSWER_BYTES, watch.look)
    # A child whose exit hangs in the driver may still have written its whole answer.
    if outcome.how == child_process.LATE:
        message = f'the driver did not answer in {deadline_s:g} s: "{library}"'
        hint = remedies.CHECK_LOG
        if watch.has_slept:
            raise DriverError(message, hint)
        raise NoAnswerError(message, f"{hint}, and for a CPU limit on the cgroup of the runtime")
    try:
        response = json.loads(outcome.output)
    except ValueError:
        raise NoAnswerError(
            f'"{library}" ended the process that asked it, {_how(outcome.status)}',
            remedies.CHECK_NVIDIA_SMI,
        ) from None
    if "error" in response:
        raise _failure(library, response["error"], response.get("code"), proc)
    gpus = tuple(
        Gpu(**{**gpu, "mig_devices": tuple(MigDevice(**mig) for mig in gpu["mig_devices"])})
        for gpu in response["gpus"]
    )
    return Answer(
        response["driver_version"],
        response["cuda_version"],
        gpus,
        tuple(response["problems"]),
        left_out=tuple(LeftOutDevice(**device) for device in response["left_out"]),
        is_shared=response["is_shared"],
    )


class _SleepWatch:
    """An observer of whether a process sleeps without a break from *start* to *end*.

    Such a process waits for the driver: one that is throttled, or waits for memory, is runnable at
    times, or its context switches grow.
    """

    def __init__(self, pid: int, start: float, end: float) -> None:
        self._pid = pid
        self._next = start
        self._latest_start = (start + end) / 2
        self._sleep: str | None = None
        self.has_slept = False

    def look(self) -> None:
        """Observe the process if the next observation is due."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        if self._sleep is None:
            # An observation that starts late proves nothing: this process got no CPU time either.
            self._sleep = _sleep_of(self._pid) if now < self._latest_start else ""
            return
        if _sleep_of(self._pid) != self._sleep:
            self._sleep = ""
        self.has_slept = bool(self._sleep)


def _sleep_of(child: int) -> str:
    """Return the context switch counts of *child*; "" if it does not sleep."""
    try:
        with open(f"/proc/{child}/status", encoding="ascii", errors="replace") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return ""
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    if facts.get("State", "").split()[:1] not in (["S"], ["D"]):
        return ""
    switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return " ".join(facts.get(name, "").strip() for name in switches)


def _how(status: int | None) -> str:
    if status is None:
        return "status unknown"
    return f"status {status}" if status >= 0 else f"signal {-status}"


def _failure(library: str, text: str, code: int | None, proc: str) -> DriverError:
    message = f'NVML of "{library}": {text}'
    host = remedies.LiveHost(proc.removesuffix("/proc"))
    if code is None or code in _OF_THIS_PROCESS:
        return NoAnswerError(message, remedies.CHECK_NVIDIA_SMI)
    if code == _DRIVER_MISMATCH:
        versions = of_name(os.path.realpath(library)), module_version(proc)
        installed, loaded = (version or "of unknown version" for version in versions)
        return DriverError(
            f"{message}: the library is {installed}, the loaded kernel module {loaded}",
            remedies.version_mismatch(host, loaded, installed),
        )
    if code == _DRIVER_NOT_LOADED and module_version(proc) is None:
        why, action = remedies.unloaded_module(host)
        return DriverError(f"{message}: {why}", action)
    return DriverError(message, remedies.CHECK_NVIDIA_SMI)


def module_version(proc: str = "/proc") -> str | None:
    """Return the version of the loaded kernel module; None if there is none."""
    try:
        with open(f"{proc}/driver/nvidia/version", encoding="utf-8", errors="replace") as stream:
            first = stream.readline(4096)
    except OSError:
        return None
    return of_module_text(first) or None


# The code from here on runs in the child.

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


class _NvmlError(Exception):
    """NVML returned the error *code*, which it describes as *text*."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Library(ctypes.CDLL):
    """A loaded NVML, in which any function may be missing."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (a function of ctypes)
        """Return the newest version of the function *name*; raise _NvmlError without one."""
        symbols = _SYMBOLS.get(name, (name,))
        for symbol in symbols:
            try:
                return super().__getattr__(symbol)
            except AttributeError:
                continue
        # Not an AttributeError, from which pynvml makes an error that does not name the function.
        raise _NvmlError(_FUNCTION_NOT_FOUND, f"this NVML has no {symbols[-1]}")


class _Nvml:
    """The NVML at *path*, called through pynvml; errors are _NvmlError."""

    def __init__(self, path: str) -> None:
        """Load the library; raise OSError."""
        import pynvml  # noqa: PLC0415 (large: only the child imports it)

        # pynvml would load the first libnvidia-ml.so.1 on the loader's path.
        pynvml.nvmlLib = _Library(path)
        # The sizes of pynvml's buffers; a driver may have longer names than NVML documents.
        pynvml.NVML_DEVICE_NAME_V2_BUFFER_SIZE = _TEXT_BYTES
        pynvml.NVML_DEVICE_UUID_V2_BUFFER_SIZE = _TEXT_BYTES
        self._pynvml = pynvml

    def ask(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 (what pynvml returns)
        """Return what the function *name* of pynvml returns; raise _NvmlError."""
        try:
            return getattr(self._pynvml, name)(*arguments)
        except self._pynvml.NVMLError as error:
            raise _NvmlError(error.value, self._describe(error.value)) from None

    def text(self, name: str, *arguments: object) -> str:
        """Return the text that the function *name* returns; raise _NvmlError."""
        try:
            text: str = self.ask(name, *arguments)
        except UnicodeDecodeError as error:
            text = error.object.decode("utf-8", "surrogateescape")
        return text

    def bus_id(self, device: object) -> str:
        """Return the PCI address of *device* as sysfs spells it, "" if NVML does not know it."""
        info = _optional(self.ask, "nvmlDeviceGetPciInfo_v3", device)
        # An old NVML fills only the first of the two fields, with a domain of 4 digits.
        for field in ("busId", "busIdLegacy") if info else ():
            try:
                match = _BUS_ID.match(getattr(info, field))
            except UnicodeDecodeError:
                continue
            if match:
                return f"{int(match[1], 16):04x}:{match[2].lower()}"
        return ""

    def _describe(self, code: int) -> str:
        """Return the library's own description of *code*, which differs between versions."""
        try:
            return escape(self.text("nvmlErrorString", code) or "")
        except _NvmlError:
            return f"code {code}"


class _Problems:
    """The devices left out and why, and whether another process would leave out the same."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.left_out: list[dict[str, str]] = []
        self.is_shared = True

    def leave_out(self, name: str, error: _NvmlError, bus_id: str = "") -> None:
        """Note that the GPU or MIG device *name* is left out because of *error*."""
        hint = remedies.CHECK_NVIDIA_SMI if error.code in _OF_THIS_PROCESS else remedies.RESET_GPU
        device = {"name": name, "bus_id": bus_id, "reason": str(error), "hint": hint}
        self.left_out.append(device)
        self._note(str(LeftOutDevice(**device)), error)

    def leave_out_mig_devices(self, gpu: int, error: _NvmlError) -> None:
        """Note that all MIG devices of *gpu* are left out because of *error*."""
        self._note(f"the MIG devices of GPU {gpu} are left out: {error}", error)

    def _note(self, text: str, error: _NvmlError) -> None:
        self.texts.append(text)
        self.is_shared = self.is_shared and error.code not in _OF_THIS_PROCESS


def _be_child(writer: int, library: str, deadline_s: float, proc: str) -> int:
    """Write the answer of *library* to *writer*, and return the exit status."""
    # An unreachable object of the parent must not close its descriptor's number here.
    gc.disable()
    # NVML may start nvidia-modprobe and wait for it.
    for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # End the child even if its parent no longer exists.
    signal.setitimer(signal.ITIMER_REAL, deadline_s + 1)
    os.dup2(writer, 3, inheritable=False)
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    # An abandoned child must not hold the parent's locks or pipes.
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    os.environ.clear()
    os.environ.update({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"})
    try:
        response = _ask(library, proc)
    except _NvmlError as error:
        response = {"error": str(error), "code": error.code}
    except (OSError, ImportError) as error:
        # An error of the loader, which may lack memory or descriptors, not of NVML.
        response = {"error": escape(str(error))}
    view = memoryview(json.dumps(response).encode())
    while view:
        view = view[os.write(3, view) :]
    return 0


def _ask(library: str, proc: str) -> dict[str, Any]:
    nvml = _Nvml(library)
    nvml.ask("nvmlInit")
    gpus: list[dict[str, Any]] = []
    problems = _Problems()
    for index in range(nvml.ask("nvmlDeviceGetCount")):
        try:
            gpus.append(_gpu(nvml, index, proc, problems))
        except _NvmlError as error:
            # A GPU that has fallen off the bus does not affect the others.
            problems.leave_out(str(index), error, _bus_id_of_failed(nvml, index))
    return {
        "driver_version": _unless_error(nvml.text, "nvmlSystemGetDriverVersion") or None,
        "cuda_version": _cuda_version(nvml),
        "gpus": gpus,
        "problems": problems.texts,
        "left_out": problems.left_out,
        "is_shared": problems.is_shared,
    }


def _bus_id_of_failed(nvml: _Nvml, index: int) -> str:
    """Return the PCI address of a GPU that failed, "" if NVML does not return it."""
    device = _unless_error(nvml.ask, "nvmlDeviceGetHandleByIndex", index)
    return "" if device is None else _unless_error(nvml.bus_id, device) or ""


def _cuda_version(nvml: _Nvml) -> str:
    """Return the newest version of CUDA that the driver runs, "" if NVML does not tell."""
    number = _unless_error(nvml.ask, "nvmlSystemGetCudaDriverVersion_v2")
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _gpu(nvml: _Nvml, index: int, proc: str, problems: _Problems) -> dict[str, Any]:
    """Return what there is to know of one GPU; raise _NvmlError if it cannot be used."""
    device = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    uuid = _uuid(nvml, device, f"GPU {index}", problems)
    bus_id = nvml.bus_id(device)
    gpu: dict[str, Any] = {
        "index": index,
        "uuid": uuid,
        "minor": _minor(nvml, device, bus_id, proc),
        "name": _optional(nvml.text, "nvmlDeviceGetName", device) or "",
        "bus_id": bus_id,
        "architecture": _architecture(nvml, device),
        "brand": _brand(nvml, device),
        "mig_enabled": False,
        "mig_devices": [],
    }
    mode = _optional(nvml.ask, "nvmlDeviceGetMigMode", device)
    if mode and mode[0]:
        gpu["mig_enabled"] = True
        gpu["mig_devices"] = _mig_devices(nvml, device, index, problems)
    return gpu


def _mig_devices(
    nvml: _Nvml, device: object, gpu: int, problems: _Problems
) -> list[dict[str, Any]]:
    mig_devices = []
    count = _optional(nvml.ask, "nvmlDeviceGetMaxMigDeviceCount", device)
    for index in range(_MAX_MIG_DEVICES if count is None else count):
        name = f"{gpu}:{index}"
        try:
            mig = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, index)
        except _NvmlError as error:
            if error.code in _NOT_HERE:
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
        except _NvmlError as error:
            problems.leave_out(name, error)
    return mig_devices


def _optional(ask: Any, *arguments: object) -> Any:  # noqa: ANN401 (what *ask* returns)
    """Return what *ask* returns, None if NVML does not support it; raise _NvmlError."""
    try:
        return ask(*arguments)
    except _NvmlError as error:
        if error.code not in _NOT_HERE:
            raise
        return None


def _unless_error(ask: Any, *arguments: object) -> Any:  # noqa: ANN401 (what *ask* returns)
    """Return what *ask* returns, None for any error: for data that a container can do without."""
    try:
        return ask(*arguments)
    except _NvmlError:
        return None


def _architecture(nvml: _Nvml, device: object) -> str:
    """Return the compute capability, "" if NVML does not report it."""
    capability = _unless_error(nvml.ask, "nvmlDeviceGetCudaComputeCapability", device)
    return "{}.{}".format(*capability) if capability else ""


def _brand(nvml: _Nvml, device: object) -> str:
    """Return the brand as requirements spell it, "" if NVML does not report it."""
    number = _unless_error(nvml.ask, "nvmlDeviceGetBrand", device)
    if number is None:
        return ""
    return _BRANDS[number] if number < len(_BRANDS) else _BRANDS[0]


def _uuid(nvml: _Nvml, device: object, subject: str, problems: _Problems) -> str:
    """Return the UUID, "" if it is missing or cannot be a name; raise _NvmlError."""
    uuid: str = _optional(nvml.text, "nvmlDeviceGetUUID", device) or ""
    if uuid and not _UUID.match(uuid):
        problems.texts.append(f'{subject} has no name by its UUID, which is "{escape(uuid)}"')
        return ""
    return uuid


def _minor(nvml: _Nvml, device: object, bus_id: str, proc: str) -> int:
    """Return the minor of the GPU's node, from the kernel if NVML does not report it."""
    try:
        return int(nvml.ask("nvmlDeviceGetMinorNumber", device))
    except _NvmlError as error:
        if error.code not in _NOT_HERE or not bus_id:
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
