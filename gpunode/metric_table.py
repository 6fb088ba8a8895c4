# SPDX-License-Identifier: Apache-2.0
"""The metrics of the exporter: names, types and help texts, and where the values come from.

Names, labels and units of the first table are those of dcgm-exporter, so that dashboards keep
working. NVML cannot measure what is in UNAVAILABLE.
"""

from __future__ import annotations

from dataclasses import dataclass

GAUGE, COUNTER, LABEL = "gauge", "counter", "label"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: *source* is the function of NVML or the service that has the value."""

    name: str
    type: str
    help: str
    source: str


def _dcgm(name: str, type_: str, help_: str, source: str) -> Metric:
    return Metric(f"DCGM_FI_{name}", type_, help_, source)


# In the order of the scrape.
DEVICE_METRICS = (
    _dcgm("DEV_SM_CLOCK", GAUGE, "SM clock frequency (in MHz).", "nvmlDeviceGetClockInfo"),
    _dcgm("DEV_MEM_CLOCK", GAUGE, "Memory clock frequency (in MHz).", "nvmlDeviceGetClockInfo"),
    _dcgm("DEV_MEMORY_TEMP", GAUGE, "Memory temperature (in C).", "nvmlDeviceGetFieldValues"),
    _dcgm("DEV_GPU_TEMP", GAUGE, "GPU temperature (in C).", "nvmlDeviceGetTemperature"),
    _dcgm("DEV_POWER_USAGE", GAUGE, "Power draw (in W).", "nvmlDeviceGetPowerUsage"),
    _dcgm(
        "DEV_TOTAL_ENERGY_CONSUMPTION",
        COUNTER,
        "Energy since the driver was loaded (in mJ).",
        "nvmlDeviceGetTotalEnergyConsumption",
    ),
    _dcgm("DEV_PCIE_REPLAY_COUNTER", COUNTER, "PCIe retries.", "nvmlDeviceGetPcieReplayCounter"),
    _dcgm("DEV_GPU_UTIL", GAUGE, "GPU utilization (in %).", "nvmlDeviceGetUtilizationRates"),
    _dcgm(
        "DEV_MEM_COPY_UTIL", GAUGE, "Memory utilization (in %).", "nvmlDeviceGetUtilizationRates"
    ),
    _dcgm("DEV_ENC_UTIL", GAUGE, "Encoder utilization (in %).", "nvmlDeviceGetEncoderUtilization"),
    _dcgm("DEV_DEC_UTIL", GAUGE, "Decoder utilization (in %).", "nvmlDeviceGetDecoderUtilization"),
    _dcgm("DEV_XID_ERRORS", GAUGE, "The last XID error, 0 without one.", "nvmlEventSetWait"),
    _dcgm("DEV_FB_FREE", GAUGE, "Free memory (in MiB).", "nvmlDeviceGetMemoryInfo"),
    _dcgm("DEV_FB_USED", GAUGE, "Used memory (in MiB).", "nvmlDeviceGetMemoryInfo"),
    _dcgm("DEV_FB_RESERVED", GAUGE, "Reserved memory (in MiB).", "nvmlDeviceGetMemoryInfo_v2"),
    *(
        _dcgm(f"DEV_ECC_{name}", COUNTER, text, "nvmlDeviceGetTotalEccErrors")
        for name, text in (
            ("SBE_VOL_TOTAL", "Corrected ECC errors since the driver was loaded."),
            ("DBE_VOL_TOTAL", "Uncorrected ECC errors since the driver was loaded."),
            ("SBE_AGG_TOTAL", "Corrected ECC errors over the life of the GPU."),
            ("DBE_AGG_TOTAL", "Uncorrected ECC errors over the life of the GPU."),
        )
    ),
    _dcgm(
        "DEV_UNCORRECTABLE_REMAPPED_ROWS",
        COUNTER,
        "Rows remapped for uncorrectable errors.",
        "nvmlDeviceGetRemappedRows",
    ),
    _dcgm(
        "DEV_CORRECTABLE_REMAPPED_ROWS",
        COUNTER,
        "Rows remapped for correctable errors.",
        "nvmlDeviceGetRemappedRows",
    ),
    _dcgm(
        "DEV_ROW_REMAP_PENDING",
        GAUGE,
        "Whether a row is remapped at the next reset.",
        "nvmlDeviceGetRemappedRows",
    ),
    _dcgm("DEV_ROW_REMAP_FAILURE", GAUGE, "Whether a remap failed.", "nvmlDeviceGetRemappedRows"),
)
# Labels that a collectors file can add to every series.
LABELS = (
    _dcgm("DRIVER_VERSION", LABEL, "Driver version.", "nvmlSystemGetDriverVersion"),
    _dcgm("CUDA_DRIVER_VERSION", LABEL, "CUDA version.", "nvmlSystemGetCudaDriverVersion"),
)
# Metrics of dcgm-exporter's default file that have no source without DCGM, with the reason.
UNAVAILABLE = {
    **dict.fromkeys(
        (
            *("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
            *("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_PCIE_TX_BYTES"),
            "DCGM_FI_PROF_PCIE_RX_BYTES",
        ),
        "a profiling counter, which only DCGM reads",
    ),
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "a counter that DCGM computes",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS": "the state of a guest's licence, not of the node",
}
# Metrics of ours, without labels of a device where none is named.
DRIVER_UP = Metric(
    *("gpu_node_driver_up", GAUGE, "Whether the driver answers; the label state says why not."),
    "watcher",
)
TELEMETRY_AGE = Metric(
    "gpu_node_telemetry_age_seconds", GAUGE, "Age of the values of the devices.", "watcher"
)
POD_MAPPING_UP = Metric(
    *("gpu_node_pod_mapping_up", GAUGE, "Whether the kubelet says which pods use the devices."),
    "pod-resources",
)
IDLE_SECONDS = Metric(
    *("gpu_node_idle_seconds", GAUGE, "Seconds since the device was last used."),
    "utilization, processes",
)
PROCESS_MEMORY = Metric(
    *("gpu_node_process_memory_mib", GAUGE, "Memory of the processes of a pod (in MiB)."),
    "nvmlDeviceGetComputeRunningProcesses",
)
DUPLICATES = Metric(
    "gpu_node_duplicate_series", GAUGE, "Series left out of this scrape as repeated.", "exporter"
)
OWN_METRICS = (
    *(DRIVER_UP, TELEMETRY_AGE, POD_MAPPING_UP, IDLE_SECONDS, PROCESS_MEMORY, DUPLICATES),
)
