# SPDX-License-Identifier: Apache-2.0
"""The state of the NVLink fabric of each GPU, as NVML reports it."""

from __future__ import annotations

from typing import Any

from gpuruntime.discover import nvml
from gpuruntime.discover.nvml_calls import Nvml, NvmlError
from gpuruntime.errors import DriverError
from gpuruntime.record import Record

# nvmlGpuFabricState_t.
NOT_SUPPORTED, NOT_STARTED, IN_PROGRESS, COMPLETED = range(4)


class FabricState(Record):
    """The *state* of the fabric of the GPU *index*, and the *status* in which it completed.

    The status is an nvmlReturn_t, 0 for success.
    """

    __slots__ = ("index", "state", "status")

    def __init__(self, index: int, state: int, status: int) -> None:
        self.index = index
        self.state = state
        self.status = status


def query(library: str, deadline_s: float) -> list[FabricState]:
    """Return the states of the GPUs that have a fabric, by the NVML at the host path *library*.

    Raises DriverError as `nvml.query` does.
    """
    with nvml.Query(library, deadline_s, describe=_describe) as started:
        response = started.response()
    try:
        return [FabricState(*map(int, row)) for row in response["states"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DriverError(f'NVML of "{library}" returned no states of the fabric') from error


def _describe(library: Nvml, _proc: str) -> dict[str, Any]:
    """Return the rows of `query`; called in the child."""
    import pynvml  # noqa: PLC0415 (the child has loaded it)

    states = []
    for index in range(library.ask("nvmlDeviceGetCount")):
        info = pynvml.c_nvmlGpuFabricInfo_t()
        try:
            device = library.ask("nvmlDeviceGetHandleByIndex", index)
            library.ask("nvmlDeviceGetGpuFabricInfo", device, pynvml.byref(info))
        except NvmlError:
            # An old NVML, or a GPU that the check "answer" reports.
            continue
        if info.state != NOT_SUPPORTED:
            states.append([index, int(info.state), int(info.status)])
    return {"states": states}
