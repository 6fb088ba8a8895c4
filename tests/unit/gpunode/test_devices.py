# SPDX-License-Identifier: Apache-2.0
"""The resources of a node: MIG strategies, sharing, names and ids."""

from __future__ import annotations

import pytest
from nodes import gpu, mig_uuid, model, uuid

from gpunode import devices
from gpunode.config import file as files
from gpunode.config.effective import Config, OptionText, effective
from gpunode.devices import LayoutError
from gpunode.model import NodeModel


def _config(sharing: str = "", **options: str) -> Config:
    text = f"sharing: {sharing}" if sharing else ""
    given = {name: OptionText(value, name) for name, value in options.items()}
    return effective(given, files.parse(text, "c.yaml"))


def _offered(node: NodeModel, config: Config) -> dict[str, list[str]]:
    """Return resource → ids of its units."""
    return {
        resource.name: [unit.id for unit in resource.units]
        for resource in devices.offer(node, config).resources
    }


WHOLE = model(gpu(0, numa=1), gpu(1))
EQUAL = model(gpu(0, mig=["1g.5gb"] * 2), gpu(1, mig=["1g.5gb"]))
SEVERAL = model(gpu(0, mig=["1g.5gb", "2g.10gb", "1g.5gb+me"]), gpu(1), gpu(2, mig=[]))
MIG_UNITS = [mig_uuid(0, 0), mig_uuid(0, 1), mig_uuid(1, 0)]


@pytest.mark.parametrize(
    ("node", "strategy", "expected"),
    [
        (WHOLE, "none", {"nvidia.com/gpu": [uuid(0), uuid(1)]}),
        (WHOLE, "single", {"nvidia.com/gpu": [uuid(0), uuid(1)]}),
        (WHOLE, "mixed", {"nvidia.com/gpu": [uuid(0), uuid(1)]}),
        (EQUAL, "none", {"nvidia.com/gpu": [uuid(0), uuid(1)]}),
        (EQUAL, "single", {"nvidia.com/gpu": MIG_UNITS}),
        (EQUAL, "mixed", {"nvidia.com/mig-1g.5gb": MIG_UNITS}),
        (SEVERAL, "none", {"nvidia.com/gpu": [uuid(0), uuid(1), uuid(2)]}),
        (
            SEVERAL,
            "mixed",
            {
                "nvidia.com/gpu": [uuid(1)],
                "nvidia.com/mig-1g.5gb": [mig_uuid(0, 0)],
                "nvidia.com/mig-1g.5gb.me": [mig_uuid(0, 2)],
                "nvidia.com/mig-2g.10gb": [mig_uuid(0, 1)],
            },
        ),
        (model(), "none", {}),
        (model(gpu(0, name="NVIDIA DGX Display")), "none", {}),
    ],
)
def test_the_resources_of_each_mig_strategy(
    node: NodeModel, strategy: str, expected: dict[str, list[str]]
) -> None:
    """The table of names: full GPUs and MIG devices by strategy."""
    assert _offered(node, _config(mig_strategy=strategy)) == expected


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (model(gpu(0, mig=[])), "device 0 has no MIG devices configured"),
        (
            model(gpu(0, mig=["1g.5gb", "1g.5gb", "3g.20gb"])),
            "more than one MIG device type present on node: 1g.5gb, 3g.20gb",
        ),
        (
            model(gpu(0, mig=["1g.5gb"]), gpu(1)),
            "all devices on the node must be configured with the same migEnabled value",
        ),
    ],
)
def test_layouts_that_the_strategy_single_refuses(node: NodeModel, expected: str) -> None:
    """Report 460 of the operator: a layout that does not fit ended in a panic."""
    with pytest.raises(LayoutError, match=expected) as caught:
        devices.offer(node, _config(mig_strategy="single"))
    assert "--mig-strategy=mixed" in str(caught.value.hint)


def test_mixed_serves_the_rest_beside_an_empty_mig_gpu() -> None:
    """Report 767 of the device plugin: an empty MIG GPU must not fail the others."""
    result = devices.offer(SEVERAL, _config(mig_strategy="mixed"))
    assert len(result.resources) == 4
    assert result.problems == ("GPU 2 is in MIG mode and has no MIG device",)


def test_parts_of_gpu_instances_are_not_offered() -> None:
    """The kubelet could not tell whether a `1c.2g` is free beside a `2g`."""
    result = devices.offer(
        model(gpu(0, mig=["1c.2g.10gb", "2g.10gb"])), _config(mig_strategy="mixed")
    )
    assert [r.name for r in result.resources] == ["nvidia.com/mig-2g.10gb"]
    assert "0:0 is not offered: its profile 1c.2g.10gb" in result.problems[0]


def _units(device: str, replicas: int) -> list[str]:
    return [f"{device}::{i}" for i in range(replicas)]


FOUR = model(*(gpu(i) for i in range(4)))


@pytest.mark.parametrize(
    ("node", "sharing", "strategy", "expected"),
    [
        (
            WHOLE,
            "{timeSlicing: {resources: [{name: gpu, replicas: 2}]}}",
            "none",
            {"nvidia.com/gpu": [*_units(uuid(0), 2), *_units(uuid(1), 2)]},
        ),
        (
            FOUR,
            "{timeSlicing: {resources: [{name: gpu, devices: [1], replicas: 2}]}}",
            "none",
            {"nvidia.com/gpu": [uuid(0), *_units(uuid(1), 2), uuid(2), uuid(3)]},
        ),
        (
            FOUR,
            f"""{{timeSlicing: {{renameByDefault: true, resources:
              [{{name: gpu, devices: [{uuid(3)}, '0'], replicas: 2}}]}}}}""",
            "none",
            {
                "nvidia.com/gpu": [uuid(1), uuid(2)],
                "nvidia.com/gpu.shared": [*_units(uuid(0), 2), *_units(uuid(3), 2)],
            },
        ),
        (
            FOUR,
            (
                "{timeSlicing: {resources: [{name: gpu, devices: [0], replicas: 2, rename: a},"
                "{name: gpu, devices: [1], replicas: 3, rename: a}]}}"
            ),
            "none",
            {
                "nvidia.com/a": [*_units(uuid(0), 2), *_units(uuid(1), 3)],
                "nvidia.com/gpu": [uuid(2), uuid(3)],
            },
        ),
        (
            FOUR,
            "{mps: {resources: [{name: gpu, devices: 2, replicas: 2, rename: part}]}}",
            "none",
            {
                "nvidia.com/gpu": [uuid(2), uuid(3)],
                "nvidia.com/part": [*_units(uuid(0), 2), *_units(uuid(1), 2)],
            },
        ),
        (
            EQUAL,
            (
                "{timeSlicing: {resources: [{name: mig-1g.5gb, devices: ['0:1', "
                f"{mig_uuid(1, 0)}], replicas: 2}}]}}}}"
            ),
            "mixed",
            {
                "nvidia.com/mig-1g.5gb": [
                    mig_uuid(0, 0),
                    *_units(mig_uuid(0, 1), 2),
                    *_units(mig_uuid(1, 0), 2),
                ]
            },
        ),
        (
            EQUAL,
            "{timeSlicing: {resources: [{name: gpu, replicas: 2}]}}",
            "single",
            {"nvidia.com/gpu": [unit for device in MIG_UNITS for unit in _units(device, 2)]},
        ),
    ],
)
def test_which_devices_are_shared(
    node: NodeModel, sharing: str, strategy: str, expected: dict[str, list[str]]
) -> None:
    """All, a count, indices, UUIDs and MIG devices; the others stay whole."""
    config = _config(sharing, mig_strategy=strategy, mps_root="/mps")
    assert _offered(node, config) == expected


def test_seven_slices_four_times_are_28_units() -> None:
    """The number of the field's articles."""
    config = _config(
        "{timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 4}]}}", mig_strategy="mixed"
    )
    (resource,) = devices.offer(model(gpu(0, mig=["1g.5gb"] * 7)), config).resources
    assert len(resource.units) == 28
    assert len(resource.devices) == 7
    assert max(len(unit.id) for unit in resource.units) <= 63


def test_more_units_than_the_kubelet_reads_are_refused() -> None:
    """The kubelet would end the stream again and again."""
    config = _config("{timeSlicing: {resources: [{name: gpu, replicas: 10000}]}}")
    with pytest.raises(LayoutError, match="50000 units, and the kubelet reads at most 40000"):
        devices.offer(model(*(gpu(i) for i in range(5))), config)


def test_devices_to_share_that_are_missing_are_named() -> None:
    """A GPU may be lost; the others are served."""
    config = _config(
        "{timeSlicing: {resources: [{name: gpu, devices: [0, 7], replicas: 2},"
        "{name: mig-9g.1gb, replicas: 2}]}}"
    )
    result = devices.offer(WHOLE, config)
    assert result.problems == (
        'no device "7" of "nvidia.com/gpu" to share',
        '"nvidia.com/mig-9g.1gb" of the sharing section is not a resource of this node',
    )
    assert len(result.resources[0].units) == 3


@pytest.mark.parametrize(
    ("node", "replicas", "expected"),
    [
        (EQUAL, 2, "sharing using MPS is not supported for MIG devices"),
        (WHOLE, 49, "at most 48 clients of GPU 0"),
        (model(gpu(0, architecture="6.1")), 17, "at most 16 clients of GPU 0"),
    ],
)
def test_what_mps_cannot_share(node: NodeModel, replicas: int, expected: str) -> None:
    """Refused by name before anything is offered."""
    config = _config(
        f"{{mps: {{resources: [{{name: gpu, replicas: {replicas}}}]}}}}",
        mig_strategy="single",
        mps_root="/mps",
    )
    with pytest.raises(LayoutError, match=expected):
        devices.offer(node, config)


@pytest.mark.parametrize("architecture", ["7.0", "8.0", ""])
def test_mps_serves_48_clients_from_volta_on(architecture: str) -> None:
    """The incumbent gives a V100, of capability 7.0, only 16."""
    config = _config("{mps: {resources: [{name: gpu, replicas: 48}]}}", mps_root="/mps")
    (resource,) = devices.offer(model(gpu(0, architecture=architecture)), config).resources
    assert len(resource.units) == 48


def test_the_numa_node_of_a_unit() -> None:
    """A node of -1 must not reach the kubelet."""
    (resource,) = devices.offer(model(gpu(0, numa=1), gpu(1, numa=-1), gpu(2)), Config()).resources
    assert [unit.device.numa_node for unit in resource.units] == [1, None, None]
