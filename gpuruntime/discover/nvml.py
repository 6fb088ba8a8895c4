# SPDX-License-Identifier: Apache-2.0
"""Ask NVML about the GPUs, in a child process with a deadline.

A driver in trouble can block NVML for ever, in a state no signal ends. So the library is loaded
in a child, opened by path, and a child that does not answer is left behind. The child is a copy
of this process: another interpreter, or pynvml, would cost more than all that is asked.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import time
from typing import Any, NoReturn

from gpuruntime.errors import DriverError, escape
from gpuruntime.formats.driver_version import of_module_text, of_name
from gpuruntime.model import Gpu, MigDevice
from gpuruntime.record import Record

DEADLINE_S = 30.0
# How long a killed process may take to end.
_KILL_S = 0.5
_ANSWER_BYTES = 8 << 20
_HINT = 'check that "nvidia-smi -L" works on the host'

# nvmlReturn_t, as far as we look at it.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND = 2, 3, 6
_INSUFFICIENT_SIZE, _FUNCTION_NOT_FOUND = 7, 13
_DRIVER_NOT_LOADED, _DRIVER_MISMATCH = 9, 18
# What an older NVML, or another GPU, answers to a question that it does not know.
_NOT_HERE = (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND)
_NO_SUCH_MIG = (_NOT_FOUND, _INVALID_ARGUMENT)

# Functions of which there are several versions, the newest first; all others have one.
_VERSIONS = {
    "nvmlInit": ("nvmlInit_v2", "nvmlInit"),
    "nvmlDeviceGetCount": ("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"),
    "nvmlDeviceGetHandleByIndex": (
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetHandleByIndex",
    ),
    "nvmlSystemGetCudaDriverVersion": (
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlSystemGetCudaDriverVersion",
    ),
}
# nvmlBrandType_t, in order, as requirements spell it.
_BRANDS = (
    *("unknown", "quadro", "tesla", "nvs", "grid", "geforce", "titan"),
    *("nvidiavapps", "nvidiavpc", "nvidiavcs", "nvidiavws", "nvidiacloudgaming"),
    *("quadrortx", "nvidiartx", "nvidia", "geforcertx", "titanrtx"),
)
# NVML's own limits, and what no answer exceeds.
_TEXT_BYTES, _LONG_TEXT_BYTES = 96, 4096
# nvmlPciInfo_t: the bus id is at the end, and in older versions at the start, with 4 digits.
_PCI_INFO_BYTES = 256
_BUS_ID_AT, _OLD_BUS_ID_AT = 36, 0
_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\Z", re.IGNORECASE)
# What a GPU can be divided into, for an NVML that does not tell.
_MAX_MIG_DEVICES = 7
_UUID = re.compile(r"[!-~]{1,200}\Z")


class Answer(Record):
    """What NVML says: the driver's versions if it knows, the GPUs, what is left out and why."""

    __slots__ = ("cuda_version", "driver_version", "gpus", "problems")

    def __init__(
        self,
        driver_version: str | None,
        cuda_version: str,
        gpus: tuple[Gpu, ...],
        problems: tuple[str, ...],
    ) -> None:
        self.driver_version = driver_version
        self.cuda_version = cuda_version
        self.gpus = gpus
        self.problems = problems


def query(library: str, deadline_s: float = DEADLINE_S, *, proc: str = "/proc") -> Answer:
    """Ask the NVML at the host path *library* (`nvidia-smi -L` shows the same).

    To be called where there is one thread. Raises DriverError if the library cannot be loaded,
    fails, or does not answer in *deadline_s* seconds.
    """
    end = time.monotonic() + deadline_s
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        raise DriverError(
            f'cannot start the process that asks "{library}": {error.strerror}',
            "end other processes, or raise the limit on their number",
        ) from error
    if child == 0:
        _be_child(writer, library, deadline_s, proc)
    os.close(writer)
    try:
        output = _read(reader, end)
    except BaseException:
        _end(child, time.monotonic())
        raise
    finally:
        os.close(reader)
    status = _end(child, end)
    if output is None:
        raise DriverError(
            f'the driver did not answer in {deadline_s:g} s: "{library}"',
            'look for NVRM and Xid lines in "dmesg"',
        )
    try:
        answer = json.loads(output)
    except ValueError:
        raise DriverError(
            f'"{library}" ended the process that asked it, {_how(status)}', _HINT
        ) from None
    if "error" in answer:
        raise _failure(library, answer["error"], answer.get("code"), proc)
    gpus = tuple(
        Gpu(**{**gpu, "mig_devices": tuple(MigDevice(**mig) for mig in gpu["mig_devices"])})
        for gpu in answer["gpus"]
    )
    return Answer(
        answer["driver_version"], answer["cuda_version"], gpus, tuple(answer["problems"])
    )


def _read(reader: int, end: float) -> bytes | None:
    """Return what comes from *reader* until its end; None if that is later than *end*."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    output = b""
    while len(output) <= _ANSWER_BYTES:
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        output += chunk
    return output


def _end(child: int, end: float) -> int | None:
    """Return the status of *child*, killed if it lives after *end*; None if it lives on.

    In the driver not even SIGKILL may end it.
    """
    is_killed = False
    while True:
        try:
            pid, status = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:
            # Who ignores SIGCHLD gets no status.
            return None
        if pid:
            return status
        if time.monotonic() >= end:
            if is_killed:
                return None
            _kill(child)
            is_killed = True
            end += _KILL_S
        time.sleep(0.001)


def _kill(child: int) -> None:
    """Kill *child* and what it has started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        # So young that it has no process group of its own.
        os.kill(child, signal.SIGKILL)


def _how(status: int | None) -> str:
    if status is None:
        return "status unknown"
    code = os.waitstatus_to_exitcode(status)
    return f"status {code}" if code >= 0 else f"signal {-code}"


def _failure(library: str, text: str, code: int | None, proc: str) -> DriverError:
    message = f'NVML of "{library}": {text}'
    if code == _DRIVER_MISMATCH:
        versions = of_name(os.path.realpath(library)), module_version(proc)
        ours, loaded = (known or "of unknown version" for known in versions)
        return DriverError(
            f"{message}: the library is {ours}, the loaded kernel module {loaded}",
            "reboot, or unload the kernel modules of the driver and load the installed ones",
        )
    if code == _DRIVER_NOT_LOADED and module_version(proc) is None:
        return DriverError(message, 'run "modprobe nvidia" on the host')
    return DriverError(message, _HINT)


def module_version(proc: str = "/proc") -> str | None:
    """Return the version of the loaded kernel module; None if there is none."""
    try:
        with open(f"{proc}/driver/nvidia/version", encoding="utf-8", errors="replace") as stream:
            first = stream.readline(4096)
    except OSError:
        return None
    return of_module_text(first) or None


# From here on: what the child does.


class _NvmlError(Exception):
    """NVML answered *code*, which it calls *text*."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Nvml:
    """A loaded NVML, of which each function may be missing."""

    def __init__(self, path: str) -> None:
        """Load it; raise OSError."""
        self._library = ctypes.CDLL(path)
        self._functions: dict[str, Any] = {}
        self._text = ctypes.create_string_buffer(_TEXT_BYTES)

    def call(self, name: str, *arguments: object) -> None:
        """Call the newest version of the function *name*; raise _NvmlError."""
        if name not in self._functions:
            self._functions[name] = self._find(name)
        function = self._functions[name]
        if function is None:
            raise _NvmlError(_FUNCTION_NOT_FOUND, f"this NVML has no {name}")
        code = function(*arguments)
        if code != 0:
            raise _NvmlError(code, self._describe(code))

    def number(self, name: str, *arguments: object) -> int:
        """Return the number that the function *name* tells; raise _NvmlError."""
        found = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(found))
        return found.value

    def handle(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """Return the device that the function *name* tells; raise _NvmlError."""
        found = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(found))
        return found

    def text(self, name: str, *arguments: object) -> str:
        """Return the text that the function *name* tells; raise _NvmlError."""
        buffer = self._text
        buffer[0] = b"\0"
        try:
            self.call(name, *arguments, buffer, ctypes.c_uint(len(buffer)))
        except _NvmlError as error:
            if error.code != _INSUFFICIENT_SIZE:
                raise
            buffer = ctypes.create_string_buffer(_LONG_TEXT_BYTES)
            self.call(name, *arguments, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode("utf-8", "surrogateescape")

    def bus_id(self, device: ctypes.c_void_p) -> str:
        """Return the bus id of *device* as sysfs spells it, "" if NVML does not tell."""
        info = ctypes.create_string_buffer(_PCI_INFO_BYTES)
        for suffix, at in (("_v3", _BUS_ID_AT), ("_v2", _OLD_BUS_ID_AT), ("", _OLD_BUS_ID_AT)):
            try:
                self.call(f"nvmlDeviceGetPciInfo{suffix}", device, info)
            except _NvmlError as error:
                if error.code not in _NOT_HERE:
                    raise
                continue
            text = info.raw[at:].split(b"\0", 1)[0].decode("ascii", "replace")
            found = _BUS_ID.match(text)
            return f"{int(found[1], 16):04x}:{found[2].lower()}" if found else ""
        return ""

    def _find(self, name: str) -> Any:  # noqa: ANN401 (a function of ctypes, or None)
        for symbol in _VERSIONS.get(name, (name,)):
            try:
                return getattr(self._library, symbol)
            except AttributeError:
                continue
        return None

    def _describe(self, code: int) -> str:
        try:
            describe = self._library.nvmlErrorString
        except AttributeError:
            return f"code {code}"
        describe.restype = ctypes.c_char_p
        text: bytes = describe(code) or b""
        return escape(text.decode("utf-8", "surrogateescape"))


def _be_child(writer: int, library: str, deadline_s: float, proc: str) -> NoReturn:
    """Write the answer of *library* to *writer* and end."""
    status = 1
    try:
        os.setsid()
        # NVML may start nvidia-modprobe, and waits for it.
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Should nobody be there any more to end it.
        signal.setitimer(signal.ITIMER_REAL, deadline_s + 1)
        os.dup2(writer, 3, inheritable=False)
        nothing = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        # Neither locks nor pipes of ours may live on in a child that is left behind.
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.chdir("/")
        os.environ.clear()
        os.environ.update({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"})
        try:
            answer = _ask(library, proc)
        except _NvmlError as error:
            answer = {"error": str(error), "code": error.code}
        except OSError as error:
            answer = {"error": escape(str(error))}
        view = memoryview(json.dumps(answer).encode())
        while view:
            view = view[os.write(3, view) :]
        status = 0
    finally:
        # Nothing of the parent's is to be flushed or run here.
        os._exit(status)


def _ask(library: str, proc: str) -> dict[str, Any]:
    nvml = _Nvml(library)
    nvml.call("nvmlInit")
    gpus: list[dict[str, Any]] = []
    problems: list[str] = []
    for index in range(nvml.number("nvmlDeviceGetCount")):
        try:
            gpus.append(_gpu(nvml, index, proc, problems))
        except _NvmlError as error:
            # One GPU that fell off the bus does not cost the others.
            problems.append(f"GPU {index} is left out: {error}")
    return {
        "driver_version": _unless_error(nvml.text, "nvmlSystemGetDriverVersion") or None,
        "cuda_version": _cuda_version(nvml),
        "gpus": gpus,
        "problems": problems,
    }


def _cuda_version(nvml: _Nvml) -> str:
    """Return the newest version of CUDA that the driver runs, "" if NVML does not tell."""
    number = _unless_error(nvml.number, "nvmlSystemGetCudaDriverVersion")
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _gpu(nvml: _Nvml, index: int, proc: str, problems: list[str]) -> dict[str, Any]:
    """Return what there is to know of one GPU; raise _NvmlError if it cannot be used."""
    device = nvml.handle("nvmlDeviceGetHandleByIndex", ctypes.c_uint(index))
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
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml.call("nvmlDeviceGetMigMode", device, ctypes.byref(current), ctypes.byref(pending))
    except _NvmlError as error:
        if error.code not in _NOT_HERE:
            raise
        return gpu
    if current.value:
        gpu["mig_enabled"] = True
        gpu["mig_devices"] = _mig_devices(nvml, device, index, problems)
    return gpu


def _mig_devices(
    nvml: _Nvml, device: ctypes.c_void_p, gpu: int, problems: list[str]
) -> list[dict[str, Any]]:
    found = []
    count = _optional(nvml.number, "nvmlDeviceGetMaxMigDeviceCount", device)
    for index in range(_MAX_MIG_DEVICES if count is None else count):
        what = f"MIG device {gpu}:{index}"
        try:
            mig = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_uint(index))
        except _NvmlError as error:
            if error.code in _NOT_HERE:
                problems.append(f"the MIG devices of GPU {gpu} are left out: {error}")
                break
            if error.code not in _NO_SUCH_MIG:
                problems.append(f"{what} is left out: {error}")
            continue
        try:
            found.append(
                {
                    "index": index,
                    "uuid": _uuid(nvml, mig, what, problems),
                    "gpu_instance": nvml.number("nvmlDeviceGetGpuInstanceId", mig),
                    "compute_instance": nvml.number("nvmlDeviceGetComputeInstanceId", mig),
                }
            )
        except _NvmlError as error:
            problems.append(f"{what} is left out: {error}")
    return found


def _optional(ask: Any, *arguments: object) -> Any:  # noqa: ANN401 (what *ask* returns)
    """Return what *ask* returns, None where NVML does not know; raise _NvmlError."""
    try:
        return ask(*arguments)
    except _NvmlError as error:
        if error.code not in _NOT_HERE:
            raise
        return None


def _unless_error(ask: Any, *arguments: object) -> Any:  # noqa: ANN401 (what *ask* returns)
    """Return what *ask* returns, None for any error: for what no container depends on alone."""
    try:
        return ask(*arguments)
    except _NvmlError:
        return None


def _architecture(nvml: _Nvml, device: ctypes.c_void_p) -> str:
    """Return the compute capability, "" if NVML does not tell."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    references = ctypes.byref(major), ctypes.byref(minor)
    try:
        nvml.call("nvmlDeviceGetCudaComputeCapability", device, *references)
    except _NvmlError:
        return ""
    return f"{major.value}.{minor.value}"


def _brand(nvml: _Nvml, device: ctypes.c_void_p) -> str:
    """Return the brand as requirements spell it, "" if NVML does not tell."""
    number = _unless_error(nvml.number, "nvmlDeviceGetBrand", device)
    if number is None:
        return ""
    return _BRANDS[number] if number < len(_BRANDS) else _BRANDS[0]


def _uuid(nvml: _Nvml, device: ctypes.c_void_p, what: str, problems: list[str]) -> str:
    """Return the UUID, "" if there is none or none that can be a name; raise _NvmlError."""
    uuid: str = _optional(nvml.text, "nvmlDeviceGetUUID", device) or ""
    if uuid and not _UUID.match(uuid):
        problems.append(f'{what} has no name by its UUID, which is "{escape(uuid)}"')
        return ""
    return uuid


def _minor(nvml: _Nvml, device: ctypes.c_void_p, bus_id: str, proc: str) -> int:
    """Return the number of the GPU's node, from the kernel where NVML does not know it."""
    try:
        return nvml.number("nvmlDeviceGetMinorNumber", device)
    except _NvmlError as error:
        if error.code not in _NOT_HERE or not bus_id:
            raise
        try:
            with open(f"{proc}/driver/nvidia/gpus/{bus_id}/information", "rb") as stream:
                information = stream.read(1 << 16)
        except OSError:
            raise error from None
        found = re.search(rb"^Device Minor:\s*([0-9]{1,7})\s*$", information, re.MULTILINE)
        if found is None:
            raise
        return int(found[1])
