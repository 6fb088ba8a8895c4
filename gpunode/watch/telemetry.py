# SPDX-License-Identifier: Apache-2.0
"""What the child measures: the default counters of dcgm-exporter that NVML reports.

Names and units are those of dcgm-exporter: MHz, degrees Celsius, W, mJ, percent, MiB.
"""

from __future__ import annotations

from gpuruntime.discover.nvml_calls import NvmlError, unless_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpuruntime.discover.nvml_calls import Nvml

_MIB = 1 << 20
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_GPU_SENSOR = 0
_FIELD_MEMORY_TEMPERATURE = 82
# nvmlMemoryErrorType_t and nvmlEccCounterType_t.
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE, _AGGREGATE = 0, 1
_MEMORY_V2 = 0x02000028
# NVML's value for a memory use that it does not know.
_UNKNOWN_BYTES = (1 << 64) - 1


def _same(value: Any) -> Any:  # noqa: ANN401 (a number)
    return value


def _first(value: Any) -> Any:  # noqa: ANN401 (a number)
    return value[0]


# Name, function of pynvml, its arguments after the device, and the number in its result.
_SIMPLE: tuple[tuple[str, str, tuple[int, ...], Callable[[Any], float]], ...] = (
    ("DCGM_FI_DEV_SM_CLOCK", "nvmlDeviceGetClockInfo", (_SM_CLOCK,), _same),
    ("DCGM_FI_DEV_MEM_CLOCK", "nvmlDeviceGetClockInfo", (_MEMORY_CLOCK,), _same),
    ("DCGM_FI_DEV_GPU_TEMP", "nvmlDeviceGetTemperature", (_GPU_SENSOR,), _same),
    ("DCGM_FI_DEV_POWER_USAGE", "nvmlDeviceGetPowerUsage", (), lambda mw: mw / 1000),
    (
        *("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "nvmlDeviceGetTotalEnergyConsumption"),
        *((), _same),
    ),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "nvmlDeviceGetPcieReplayCounter", (), _same),
    ("DCGM_FI_DEV_ENC_UTIL", "nvmlDeviceGetEncoderUtilization", (), _first),
    ("DCGM_FI_DEV_DEC_UTIL", "nvmlDeviceGetDecoderUtilization", (), _first),
    *(
        (f"DCGM_FI_DEV_ECC_{name}", "nvmlDeviceGetTotalEccErrors", arguments, _same)
        for name, arguments in (
            ("SBE_VOL_TOTAL", (_CORRECTED, _VOLATILE)),
            ("DBE_VOL_TOTAL", (_UNCORRECTED, _VOLATILE)),
            ("SBE_AGG_TOTAL", (_CORRECTED, _AGGREGATE)),
            ("DBE_AGG_TOTAL", (_UNCORRECTED, _AGGREGATE)),
        )
    ),
)


def measure(nvml: Nvml, uuid: str, device: object, *, is_mig: bool) -> dict[str, Any]:
    """Return the values of a model.GpuTelemetry; those that NVML does not report are absent."""
    values = _memory(nvml, device)
    if not is_mig:
        values |= _of_gpu(nvml, device)
    return {"uuid": uuid, "values": values, "processes": _processes(nvml, device)}


def _of_gpu(nvml: Nvml, device: object) -> dict[str, float]:
    values = {}
    for name, function, arguments, number in _SIMPLE:
        result = unless_error(nvml.ask, function, device, *arguments)
        if result is not None:
            values[name] = number(result)
    rates = unless_error(nvml.ask, "nvmlDeviceGetUtilizationRates", device)
    if rates is not None:
        values["DCGM_FI_DEV_GPU_UTIL"] = rates.gpu
        values["DCGM_FI_DEV_MEM_COPY_UTIL"] = rates.memory
    rows = unless_error(nvml.ask, "nvmlDeviceGetRemappedRows", device)
    if rows is not None:
        values["DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"] = rows[0]
        values["DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"] = rows[1]
        values["DCGM_FI_DEV_ROW_REMAP_PENDING"] = rows[2]
        values["DCGM_FI_DEV_ROW_REMAP_FAILURE"] = rows[3]
    fields = unless_error(
        nvml.ask, "nvmlDeviceGetFieldValues", device, [_FIELD_MEMORY_TEMPERATURE]
    )
    if fields is not None and fields[0].nvmlReturn == 0:
        values["DCGM_FI_DEV_MEMORY_TEMP"] = fields[0].value.uiVal
    return values


def _memory(nvml: Nvml, device: object) -> dict[str, float]:
    """Return the memory values; a driver of before 510 counts reserved memory as used."""
    memory = unless_error(nvml.ask, "nvmlDeviceGetMemoryInfo", device, _MEMORY_V2)
    values = {}
    if memory is not None:
        values["DCGM_FI_DEV_FB_RESERVED"] = memory.reserved // _MIB
    else:
        memory = unless_error(nvml.ask, "nvmlDeviceGetMemoryInfo", device)
    if memory is not None:
        values["DCGM_FI_DEV_FB_FREE"] = memory.free // _MIB
        values["DCGM_FI_DEV_FB_USED"] = memory.used // _MIB
    return values


def _processes(nvml: Nvml, device: object) -> list[dict[str, Any]]:
    processes: dict[int, int | None] = {}
    for function in (
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    ):
        try:
            rows = nvml.ask(function, device)
        except NvmlError:
            continue
        for row in rows:
            used = row.usedGpuMemory
            is_known = used is not None and used != _UNKNOWN_BYTES
            processes[row.pid] = used // _MIB if is_known else None
    return [{"pid": pid, "memory_mib": used} for pid, used in sorted(processes.items())]
