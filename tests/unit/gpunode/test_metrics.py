# SPDX-License-Identifier: Apache-2.0
"""The metrics of one scrape."""

from __future__ import annotations

import dataclasses
from typing import Any

from unit.gpunode.nodes import A100, gpu

from gpunode import metric_table as table
from gpunode.metrics import NodeState, Settings, families
from gpunode.model import (
    DriverState,
    DriverStatus,
    GpuTelemetry,
    NodeGpu,
    NodeModel,
    Process,
    Telemetry,
)
from gpunode.pod_devices import Container, Use, Uses

READY = DriverStatus(DriverState.READY, 0.0)
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"


def scrape(
    *gpus: NodeGpu, settings: Settings | None = None, **state: Any
) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the samples of a scrape by metric."""
    node = NodeModel("570.86.15", "12.8", gpus)
    found = families(NodeState(READY, node, **state), settings or Settings())
    return {family.metric.name: list(family.samples) for family in found}


def measured(**values: float) -> Telemetry:
    """Return the temperatures of devices by UUID, with _ for -."""
    return Telemetry(
        2.5,
        tuple(
            GpuTelemetry(name.replace("_", "-"), {TEMPERATURE: value})
            for name, value in values.items()
        ),
    )


def container(pod: str, *ids: str) -> Container:
    """Return the container `main` of *pod*, with the devices *ids*."""
    return Container("ns", pod, "main", (("nvidia.com/gpu", ids),))


def test_a_gpu_has_the_labels_of_dcgm_exporter() -> None:
    """With those that the settings add."""
    settings = Settings(labels=("DCGM_FI_DRIVER_VERSION",), hostname="n1")
    assert scrape(gpu(0), telemetry=measured(GPU_0=41), settings=settings)[TEMPERATURE] == [
        (
            {
                "gpu": "0",
                "UUID": "GPU-0",
                "pci_bus_id": "00000000:00:00.0",
                "device": "nvidia0",
                "modelName": A100,
                "hostname": "n1",
                "DCGM_FI_DRIVER_VERSION": "570.86.15",
            },
            41,
        )
    ]


def test_a_mig_device_has_its_own_pod_and_its_gpus_uuid() -> None:
    """The GPU itself has series without a pod."""
    node = (gpu(0, profiles=("1g.5gb",)),)
    uses = Uses(node, [container("p", "MIG-0-0")])
    samples = scrape(*node, telemetry=measured(GPU_0=40, MIG_0_0=41), uses=uses)[TEMPERATURE]
    assert "pod" not in samples[0][0]
    labels, value = samples[1]
    assert labels.items() >= {
        *(("UUID", "GPU-0"), ("GPU_I_PROFILE", "1g.5gb"), ("GPU_I_ID", "0"), ("pod", "p"))
    }
    assert value == 41


def test_each_pod_of_a_shared_gpu_has_a_series() -> None:
    """Complaint 27; with the number of its unit, its UID and its claim's names."""
    uses = Uses([gpu(0)], [container("a", "GPU-0::0"), container("b", "GPU-0::1")])
    settings = Settings(pod_uids={("ns", "a"): "u1"})
    samples = scrape(gpu(0), telemetry=measured(GPU_0=40), uses=uses, settings=settings)
    assert [(s.get("pod"), s.get("vgpu"), s.get("pod_uid")) for s, _ in samples[TEMPERATURE]] == [
        ("a", "0", "u1"),
        ("b", "1", None),
    ]


def test_equal_series_appear_once_and_are_counted() -> None:
    """Complaint 28: two devices with the same labels."""
    samples = scrape(gpu(0), gpu(0), telemetry=measured(GPU_0=40))
    assert len(samples[TEMPERATURE]) == 1
    assert samples[table.DUPLICATES.name][0][1] > 0


def test_a_device_without_a_value_has_no_series() -> None:
    """The others have theirs."""
    samples = scrape(gpu(0), gpu(1), telemetry=measured(GPU_1=40))
    assert [labels["gpu"] for labels, _ in samples[TEMPERATURE]] == ["1"]


def test_the_last_xid_and_the_idle_time() -> None:
    """An XID of 0 means none."""
    samples = scrape(gpu(0), gpu(1), last_xids={"GPU-1": 79}, idle_s={"GPU-0": 30.0})
    assert [value for _, value in samples["DCGM_FI_DEV_XID_ERRORS"]] == [0, 79]
    assert [value for _, value in samples[table.IDLE_SECONDS.name]] == [30.0]


def test_memory_by_pod() -> None:
    """The processes of one pod are added up; one that is in no pod is left out."""
    use = Use("ns", "p", "main")
    telemetry = Telemetry(
        0.0, (GpuTelemetry("GPU-0", {}, (Process(7, 100), Process(8, 50), Process(9, 1))),)
    )
    samples = scrape(gpu(0), telemetry=telemetry, process_uses={7: use, 8: use})
    assert [(s["pod"], v) for s, v in samples[table.PROCESS_MEMORY.name]] == [("p", 150)]


def test_a_scrape_without_driver_and_kubelet_says_so() -> None:
    """The values of the last model stay, with their age."""
    hanging = DriverStatus(DriverState.HANGING, 0.0, "no answer")
    state = NodeState(hanging, NodeModel("570", "12.8", (gpu(0),)), measured(GPU_0=40))
    samples = {family.metric.name: family.samples for family in families(state, Settings())}
    assert samples[table.DRIVER_UP.name] == (({"state": "hanging"}, 0.0),)
    assert samples[table.POD_MAPPING_UP.name] == (({}, 0.0),)
    assert samples[table.TELEMETRY_AGE.name] == (({}, 2.5),)
    assert samples[TEMPERATURE]
    empty = families(dataclasses.replace(state, model=None, telemetry=None), Settings())
    assert [family.metric.name for family in empty] == [
        *(table.DRIVER_UP.name, table.POD_MAPPING_UP.name, table.DUPLICATES.name)
    ]
