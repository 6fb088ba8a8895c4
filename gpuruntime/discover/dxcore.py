# SPDX-License-Identifier: Apache-2.0
"""Ask libdxcore of WSL which driver stores the adapters of Windows have, in a child process.

The child is isolated as the one that asks NVML: a driver in trouble may block it for ever. The
structures are those of d3dkmthk.h and d3dukmdt.h in Microsoft's driver documentation, with the
wchar_t of Linux.
"""

from __future__ import annotations

import ctypes

from cdi import strictjson
from gpuruntime import child_process, remedies
from gpuruntime.discover import nvml
from gpuruntime.errors import DriverError, escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OUTPUT_BYTES = 1 << 20
# More adapters than Windows supports.
_MAX_ADAPTERS = 256
_MAX_PATH_CHARS = 4096
# The largest driver store path of Windows is 260 characters; a longer one is returned as well.
_OUTPUT_CHARS = 1024
_QUERY_REGISTRY = 48
_DRIVER_STORE_PATH = 2
_INCLUDE_COMPUTE_ONLY = 1


def driver_stores(library: str, deadline_s: float) -> list[str]:
    """Return the directory of each adapter's driver store, in the order of the adapters.

    *library* is the host path of libdxcore. Adapters without a driver store are left out. Call it
    only in a process with one thread. Raises DriverError.
    """
    try:
        child = child_process.fork(lambda writer: _be_child(writer, library, deadline_s))
    except OSError as error:
        raise nvml.NoAnswerError(
            f'cannot start the process that calls "{library}": {error.strerror}',
            "end other processes, or raise the limit on their number",
        ) from error
    outcome = child.finish(deadline_s, _OUTPUT_BYTES)
    if outcome.how == child_process.LATE:
        raise nvml.NoAnswerError(
            f'Windows did not answer in {deadline_s:g} s: "{library}"', remedies.RESTART_WSL
        )
    try:
        response = strictjson.loads(outcome.output)
    except ValueError:
        raise nvml.NoAnswerError(
            f'"{library}" ended the process that asked it, {nvml.how_it_ended(outcome.status)}',
            remedies.RESTART_WSL,
        ) from None
    if "error" in response:
        raise DriverError(f'"{library}": {response["error"]}', remedies.RESTART_WSL)
    return [str(path) for path in response["stores"]]


# The code from here on runs in the child.


class _AdapterInfo(ctypes.Structure):
    _fields_ = (
        ("handle", ctypes.c_uint),
        ("luid_low", ctypes.c_uint),
        ("luid_high", ctypes.c_int),
        ("sources", ctypes.c_uint),
        ("flags", ctypes.c_uint),
    )


class _EnumAdapters2(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint), ("adapters", ctypes.POINTER(_AdapterInfo)))


class _EnumAdapters3(ctypes.Structure):
    _fields_ = (
        ("filter", ctypes.c_uint64),
        ("count", ctypes.c_uint),
        ("adapters", ctypes.POINTER(_AdapterInfo)),
    )


class _QueryAdapterInfo(ctypes.Structure):
    _fields_ = (
        ("handle", ctypes.c_uint),
        ("type", ctypes.c_uint),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint),
    )


class _RegistryInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint),
        ("flags", ctypes.c_uint),
        ("name", ctypes.c_wchar * 260),
        ("value_type", ctypes.c_uint),
        ("physical_adapter", ctypes.c_uint),
        ("output_bytes", ctypes.c_uint),
        ("status", ctypes.c_uint),
        # A union of numbers and a string of any length, aligned as its largest number.
        ("output", ctypes.c_uint64 * (_OUTPUT_CHARS * ctypes.sizeof(ctypes.c_wchar) // 8)),
    )


class _DxcoreError(Exception):
    """A function of libdxcore failed."""


def _be_child(writer: int, library: str, deadline_s: float) -> int:
    """Write the driver stores that *library* reports to *writer*, and return the exit status."""
    nvml.isolate(writer, deadline_s)
    response: dict[str, Any]
    try:
        response = {"stores": _stores(ctypes.CDLL(library))}
    except (OSError, AttributeError, _DxcoreError) as error:
        # The loader's messages begin with the path, which the caller names.
        response = {"error": escape(str(error).removeprefix(f"{library}: "))}
    nvml.write_response(response)
    return 0


def _stores(dxcore: ctypes.CDLL) -> list[str]:
    stores = []
    for adapter in _adapters(dxcore):
        path = _driver_store(dxcore, adapter)
        if path.startswith("/") and len(path) <= _MAX_PATH_CHARS:
            stores.append(path)
    return stores


def _adapters(dxcore: ctypes.CDLL) -> list[int]:
    """Return the handles of all adapters; raise _DxcoreError.

    D3DKMTEnumAdapters3 lists adapters without a display as well; an older libdxcore lacks it.
    """
    name, kind = "D3DKMTEnumAdapters3", _EnumAdapters3
    query: Any
    if not hasattr(dxcore, name):
        name, kind = "D3DKMTEnumAdapters2", _EnumAdapters2  # type: ignore[assignment]
    query = kind()
    if hasattr(query, "filter"):
        query.filter = _INCLUDE_COMPUTE_ONLY
    call = getattr(dxcore, name)
    _check(name, call(ctypes.byref(query)))
    if not query.count:
        return []
    count = min(query.count, _MAX_ADAPTERS)
    array = (_AdapterInfo * count)()
    query.count, query.adapters = count, array
    _check(name, call(ctypes.byref(query)))
    return [array[index].handle for index in range(min(query.count, count))]


def _driver_store(dxcore: ctypes.CDLL, handle: int) -> str:
    """Return the driver store of an adapter, "" if it has none."""
    info = _RegistryInfo(type=_DRIVER_STORE_PATH)
    info.output_bytes = ctypes.sizeof(info.output)
    query = _QueryAdapterInfo(
        handle=handle,
        type=_QUERY_REGISTRY,
        data=ctypes.addressof(info),
        size=ctypes.sizeof(info),
    )
    if dxcore.D3DKMTQueryAdapterInfo(ctypes.byref(query)) or info.status:
        return ""
    characters = ctypes.cast(info.output, ctypes.POINTER(ctypes.c_uint32))
    codes = []
    for index in range(_OUTPUT_CHARS):
        code = characters[index]
        if not code:
            break
        codes.append(code)
    try:
        return "".join(map(chr, codes))
    except ValueError:
        return ""


def _check(name: str, status: int) -> None:
    if status:
        raise _DxcoreError(f"{name} returned 0x{status & 0xFFFFFFFF:08x}")
