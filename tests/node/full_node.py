# SPDX-License-Identifier: Apache-2.0
"""The exporter of a full node: 8 GPUs of 7 MIG devices, each with a pod and its process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unit.gpunode.nodes import gpu

from gpunode import metric_table as table
from gpunode.model import (
    DriverState,
    DriverStatus,
    Event,
    EventKind,
    GpuTelemetry,
    NodeGpu,
    NodeModel,
    Process,
    Telemetry,
    Update,
)
from gpunode.pod_devices import Container
from gpunode.services.exporter import Exporter, Options
from gpunode.watch.watcher import Watcher
from gpuruntime.model import MigDevice

GPUS, MIGS = 8, 7
_OF_MIG = "DCGM_FI_DEV_FB_"


def exporter(proc: Path) -> Exporter:
    """Return the exporter, which finds the cgroups of processes below *proc*."""
    for pid in range(1, GPUS * MIGS + 1):
        directory = proc / str(pid)
        directory.mkdir()
        uid = f"{pid:08x}-0000-0000-0000-000000000000"
        (directory / "cgroup").write_text(f"0::/kubepods/besteffort/pod{uid}/c\n")
    return Exporter(Watcher, None, Options(listen="127.0.0.1:0", proc=str(proc)))


def _renamed(mig: MigDevice, number: int) -> MigDevice:
    return MigDevice(
        index=mig.index,
        uuid=f"{mig.uuid}-{number}",
        gpu_instance=mig.gpu_instance,
        compute_instance=mig.compute_instance,
    )


def _gpu(index: int, number: int) -> NodeGpu:
    node_gpu = gpu(index, profiles=("1g.5gb",) * MIGS)
    migs = tuple(replace(mig, device=_renamed(mig.device, number)) for mig in node_gpu.mig_devices)
    return replace(node_gpu, mig_devices=migs)


def observe(service: Exporter, number: int) -> None:
    """Have *service* take note of the values, pods and XIDs of the poll *number*.

    The pods and the MIG devices are other ones each time.
    """
    gpus = tuple(_gpu(index, number) for index in range(GPUS))
    devices, containers, pid = [], [], 0
    values = {metric.name: float(number) for metric in table.DEVICE_METRICS}
    of_mig = {name: value for name, value in values.items() if name.startswith(_OF_MIG)}
    for node_gpu in gpus:
        devices.append(GpuTelemetry(node_gpu.gpu.uuid, values))
        for mig in node_gpu.mig_devices:
            pid += 1
            uuid = mig.device.uuid
            devices.append(GpuTelemetry(uuid, of_mig, (Process(pid, number),)))
            held = (("nvidia.com/mig-1g.5gb", (uuid,)),)
            containers.append(Container("ns", f"pod-{pid}-{number}", "main", held))
    status = DriverStatus(DriverState.READY, 0.0)
    event = Event(EventKind.XID, 0.0, uuid=gpus[0].gpu.uuid, xid=13)
    model = NodeModel("570.86.15", "12.8", gpus)
    service.take(Update(status, model, (event,)), Telemetry(0.0, tuple(devices)))
    service.containers = containers
