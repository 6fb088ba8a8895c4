# SPDX-License-Identifier: Apache-2.0
"""For how long each device has not been used; over virtual time.

A GPU is used while its utilization is above zero. NVML has no utilization of a MIG device: one
counts as used while a process computes on it.
"""

from __future__ import annotations

from gpunode.model import GpuTelemetry, Telemetry

UTILIZATION = "DCGM_FI_DEV_GPU_UTIL"


class IdleTimes:
    """The time of the last use of each device, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._last_uses: dict[str, float] = {}

    def observe(self, telemetry: Telemetry, now: float) -> None:
        """Take note of the values that were measured *telemetry.age_s* before *now*.

        A device that is seen for the first time counts as used at that time.
        """
        measured_at = now - telemetry.age_s
        self._last_uses = {
            device.uuid: measured_at
            if _is_used(device)
            else self._last_uses.get(device.uuid, measured_at)
            for device in telemetry.devices
        }

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds since the last use of each device, by UUID."""
        return {uuid: max(0.0, now - last) for uuid, last in self._last_uses.items()}


def _is_used(device: GpuTelemetry) -> bool:
    utilization = device.values.get(UTILIZATION)
    return bool(device.processes) if utilization is None else utilization > 0
