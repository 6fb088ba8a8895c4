# SPDX-License-Identifier: Apache-2.0
"""The metrics of one scrape, from the last values of the watcher; pure.

A device without a value has no series for it: one bad device never fails the scrape. Two series
with the same labels would make Prometheus refuse all of them: the second is left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpunode import metric_table as table
from gpunode.metric_table import Metric
from gpunode.model import DriverState, DriverStatus, NodeGpu, NodeMigDevice, NodeModel, Telemetry
from gpunode.pod_devices import Use, Uses

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """The series of one metric: labels and values."""

    metric: Metric
    samples: tuple[tuple[Labels, float], ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a scrape contains.

    *metrics* are the metrics of the devices, *labels* the names of table.LABELS that every series
    gets. *hostname* is a label if it is not "". *pod_uids* are by namespace and name.
    """

    metrics: Sequence[Metric] = table.DEVICE_METRICS
    labels: Sequence[str] = ()
    hostname: str = ""
    pod_uids: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeState:
    """Everything that a scrape is made of.

    *uses* is None if the kubelet could not be asked. *idle_s* are the seconds since the last use,
    by the UUID of the device, *last_xids* the last XID by the UUID of the GPU, and *process_uses*
    the use that each PID belongs to.
    """

    status: DriverStatus
    model: NodeModel | None
    telemetry: Telemetry | None = None
    uses: Uses | None = None
    idle_s: Mapping[str, float] = field(default_factory=dict)
    last_xids: Mapping[str, int] = field(default_factory=dict)
    process_uses: Mapping[int, Use] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Device:
    """A GPU or MIG device: its labels without and with each of its uses."""

    gpu: NodeGpu
    mig: NodeMigDevice | None
    labels: Labels
    uses: tuple[Use, ...]

    @property
    def uuid(self) -> str:
        return self.mig.device.uuid if self.mig else self.gpu.gpu.uuid


def families(state: NodeState, settings: Settings) -> list[Family]:
    """Return the metrics of one scrape, in a stable order, each series once."""
    devices = list(_devices(state, settings))
    measured = {one.uuid: one for one in state.telemetry.devices} if state.telemetry else {}
    scrape = _Scrape(settings)
    for metric in settings.metrics:
        for device in devices:
            values = measured[device.uuid].values if device.uuid in measured else {}
            value = values.get(metric.name)
            if metric.name == "DCGM_FI_DEV_XID_ERRORS" and device.mig is None:
                value = state.last_xids.get(device.uuid, 0)
            if value is not None:
                scrape.add_for_each_use(metric, device, value)
    for device in devices:
        if device.uuid in state.idle_s:
            scrape.add_for_each_use(table.IDLE_SECONDS, device, state.idle_s[device.uuid])
        memory: dict[Use, int] = {}
        for process in measured[device.uuid].processes if device.uuid in measured else ():
            use = state.process_uses.get(process.pid)
            if use is not None and process.memory_mib is not None:
                memory[use] = memory.get(use, 0) + process.memory_mib
        for use, size in memory.items():
            scrape.add(table.PROCESS_MEMORY, {**device.labels, **scrape.pod_labels(use)}, size)
    is_up = state.status.state is DriverState.READY
    scrape.add(table.DRIVER_UP, {"state": state.status.state.value}, float(is_up))
    if state.telemetry is not None:
        scrape.add(table.TELEMETRY_AGE, {}, state.telemetry.age_s)
    scrape.add(table.POD_MAPPING_UP, {}, float(state.uses is not None))
    return scrape.families()


class _Scrape:
    """The series that are collected, by metric."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self._metrics: dict[str, Metric] = {}
        self._repeated = 0

    def add(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """Add a series; one with labels that are there already is counted only."""
        series = self._series.setdefault(metric.name, {})
        self._metrics[metric.name] = metric
        key = tuple(sorted(labels.items()))
        if key in series:
            self._repeated += 1
        else:
            series[key] = value

    def add_for_each_use(self, metric: Metric, device: _Device, value: float) -> None:
        """Add a series for each pod that uses *device*, or one without a pod."""
        if not device.uses:
            self.add(metric, device.labels, value)
        for use in device.uses:
            self.add(metric, {**device.labels, **self.pod_labels(use)}, value)

    def pod_labels(self, use: Use) -> Labels:
        """Return the labels of the pod that *use* is of."""
        labels = {"container": use.container, "namespace": use.namespace, "pod": use.pod}
        uid = self._settings.pod_uids.get((use.namespace, use.pod))
        if uid:
            labels["pod_uid"] = uid
        if use.share:
            labels["vgpu"] = use.share
        if use.claim is not None:
            labels["dra_claim_name"] = use.claim.name
            labels["dra_claim_namespace"] = use.claim.namespace
            labels["dra_driver_name"] = use.claim.driver
            labels["dra_pool_name"] = use.claim.pool
            labels["dra_device_name"] = use.claim.device
        return labels

    def families(self) -> list[Family]:
        """Return all series, and how many were left out."""
        self.add(table.DUPLICATES, {}, self._repeated)
        return [
            Family(self._metrics[name], tuple((dict(key), value) for key, value in series.items()))
            for name, series in self._series.items()
        ]


def _devices(state: NodeState, settings: Settings) -> Iterator[_Device]:
    """Yield each GPU and each MIG device of the last model with its labels."""
    model = state.model
    if model is None:
        return
    common = {"hostname": settings.hostname} if settings.hostname else {}
    versions = {
        "DCGM_FI_DRIVER_VERSION": model.driver_version,
        "DCGM_FI_CUDA_DRIVER_VERSION": model.cuda_version,
    }
    common |= {name: versions[name] for name in settings.labels}
    for gpu in model.gpus:
        labels = {
            "gpu": str(gpu.gpu.index),
            "UUID": gpu.gpu.uuid,
            "pci_bus_id": _bus_id(gpu.gpu.bus_id),
            "device": f"nvidia{gpu.gpu.minor}",
            "modelName": gpu.gpu.name,
            **common,
        }
        yield _Device(gpu, None, labels, _uses(state, gpu.gpu.uuid))
        for mig in gpu.mig_devices:
            instance = {
                **labels,
                "GPU_I_PROFILE": mig.attributes.profile,
                "GPU_I_ID": str(mig.device.gpu_instance),
            }
            if mig.attributes.compute_slices != mig.attributes.gpu_slices:
                # Several compute instances share the GPU instance.
                instance["GPU_CI_ID"] = str(mig.device.compute_instance)
            yield _Device(gpu, mig, instance, _uses(state, mig.device.uuid))


def _uses(state: NodeState, uuid: str) -> tuple[Use, ...]:
    return state.uses.of(uuid) if state.uses is not None else ()


def _bus_id(address: str) -> str:
    """Return a PCI address of sysfs as NVML writes it: `00000000:3B:00.0`."""
    domain, colon, rest = address.partition(":")
    return f"{domain.rjust(8, '0')}:{rest}".upper() if colon else address
