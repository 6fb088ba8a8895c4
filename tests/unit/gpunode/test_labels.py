# SPDX-License-Identifier: Apache-2.0
"""The labels of a node's GPUs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.gpunode.nodes import T4, gpu

from gpunode.labels import Machine, Sharing, Vgpu, family, node_labels, valid
from gpunode.model import NodeGpu, NodeModel

# A value as the API server checks it.
VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?\Z")


def labels(*gpus: NodeGpu, **options: object) -> dict[str, str]:
    """Return the labels of a node with *gpus*, without their prefix."""
    node = NodeModel("570.86.15", "12.8", gpus)
    found = node_labels(node, Machine("X", {"0000:00:00.0": 0x0302}), **options)  # type: ignore[arg-type]
    return {name.removeprefix("nvidia.com/"): value for name, value in found.items()}


def test_whole_gpus() -> None:
    """With the versions of driver and CUDA under their present and former names."""
    assert labels(gpu(0), gpu(1), timestamp=7) == {
        "cuda.driver-version.full": "570.86.15",
        "cuda.driver-version.major": "570",
        "cuda.driver-version.minor": "86",
        "cuda.driver-version.revision": "15",
        "cuda.driver.major": "570",
        "cuda.driver.minor": "86",
        "cuda.driver.rev": "15",
        "cuda.runtime-version.full": "12.8",
        "cuda.runtime-version.major": "12",
        "cuda.runtime-version.minor": "8",
        "cuda.runtime.major": "12",
        "cuda.runtime.minor": "8",
        "gfd.timestamp": "7",
        "gpu.compute.major": "8",
        "gpu.compute.minor": "0",
        "gpu.count": "2",
        "gpu.family": "ampere",
        "gpu.machine": "X",
        "gpu.memory": "40960",
        "gpu.mode": "compute",
        "gpu.product": "NVIDIA-A100-SXM4-40GB",
        "gpu.replicas": "1",
        "gpu.sharing-strategy": "none",
        "mig.capable": "true",
        "mps.capable": "false",
        "vgpu.present": "false",
    }


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (
            [gpu(0)],
            {"sharing": {"gpu": Sharing("time-slicing", 4)}},
            {
                "gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED",
                "gpu.replicas": "4",
                "gpu.sharing-strategy": "time-slicing",
            },
        ),
        (
            [gpu(0)],
            {"sharing": {"gpu": Sharing("mps", 2, renamed=True)}},
            {"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.replicas": "2", "mps.capable": "true"},
        ),
        (
            [gpu(0, profiles=("1g.5gb",) * 7), gpu(1, profiles=("1g.5gb",) * 7)],
            {"mig_strategy": "single"},
            {
                "gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
                "gpu.count": "14",
                "gpu.memory": "4864",
                "gpu.slices.gi": "1",
                "gpu.multiprocessors": "14",
                "mig.strategy": "single",
            },
        ),
        # Whole GPUs are not offered.
        (
            [gpu(0, profiles=("1g.5gb",))],
            {"mig_strategy": "mixed", "sharing": {"gpu": Sharing("mps", 2)}},
            {"gpu.count": "1", "gpu.replicas": "0", "mps.capable": "false"},
        ),
        # Complaint 16: layouts that the strategy cannot express.
        (
            [gpu(0, profiles=("1g.5gb", "3g.20gb"))],
            {"mig_strategy": "single"},
            {"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID", "gpu.count": "0"},
        ),
        (
            [gpu(0, profiles=())],
            {"mig_strategy": "single"},
            {"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID", "gpu.memory": "0"},
        ),
        (
            [gpu(0, profiles=("1g.5gb",)), gpu(1)],
            {"mig_strategy": "single"},
            {"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID", "gpu.replicas": "0"},
        ),
        (
            [gpu(0, profiles=("1g.5gb+me", "1g.5gb")), gpu(1)],
            {"mig_strategy": "mixed", "sharing": {"mig-1g.5gb": Sharing("time-slicing", 4)}},
            {
                "gpu.count": "2",
                "mig-1g.5gb.me.count": "1",
                "mig-1g.5gb.me.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me",
                "mig-1g.5gb.replicas": "4",
                "mig-1g.5gb.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED",
            },
        ),
        # Complaint 23: the most frequent model, of two the first by name.
        (
            [gpu(0, T4), gpu(1), gpu(2, T4)],
            {},
            {"gpu.product": "Tesla-T4", "gpu.count": "2", "gpu.products.mixed": "true"},
        ),
        ([gpu(0, T4), gpu(1)], {}, {"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "1"}),
    ],
)
def test_sharing_mig_and_mixed_models(
    gpus: list[NodeGpu], options: dict[str, object], expected: dict[str, str]
) -> None:
    """The labels that differ from those of equal whole GPUs."""
    assert labels(*gpus, **options).items() >= expected.items()


def test_a_clique_is_named_if_all_gpus_are_in_it() -> None:
    """And left out otherwise."""
    members = [NodeGpu(gpu(i).gpu, cluster_uuid="c", clique_id=3) for i in range(2)]
    assert labels(*members)["gpu.clique"] == "c.3"
    assert "gpu.clique" not in labels(*members, gpu(2))


def test_without_a_driver_the_machine_has_labels() -> None:
    """A node of virtual GPUs, too."""
    machine = Machine("", vgpu=Vgpu("550.90", "r550_00"))
    assert node_labels(None, machine) == {
        "nvidia.com/gpu.machine": "unknown",
        "nvidia.com/vgpu.host-driver-branch": "r550_00",
        "nvidia.com/vgpu.host-driver-version": "550.90",
        "nvidia.com/vgpu.present": "true",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NVIDIA TITAN X (Pascal)", "NVIDIA-TITAN-X-Pascal"),
        ("X9SRA/X9SRA-3", "X9SRAX9SRA-3"),
        ("  To Be Filled By O.E.M. ", "To-Be-Filled-By-O.E.M"),
        ("a" * 80, "a" * 63),
        ("-x-", "x"),
        ("", ""),
        ("日本", ""),
    ],
)
def test_values_of_reports(text: str, value: str) -> None:
    """Complaint 22: names that are not valid labels."""
    assert valid(text) == value


@given(st.text(), st.text(), st.booleans())
def test_every_value_is_valid(product: str, machine: str, shared: bool) -> None:
    """Whatever the GPU and the machine are called."""
    sharing = {"gpu": Sharing("mps", 2)} if shared else {}
    node = NodeModel(product, product, (gpu(0, product), gpu(1, product, ("1g.5gb",))))
    for strategy in ("none", "single", "mixed"):
        found = node_labels(node, Machine(machine), mig_strategy=strategy, sharing=sharing)
        for value in found.values():
            assert len(value) <= 63
            assert VALUE.match(value)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        *(("3.7", "kepler"), ("7.2", "volta"), ("7.5", "turing"), ("8.6", "ampere")),
        *(
            ("8.9", "ada-lovelace"),
            ("9.0", "hopper"),
            ("10.3", "blackwell"),
            ("12.0", "blackwell"),
        ),
        *(("13.0", "rubin"), ("2.1", "undefined"), ("11.0", "undefined"), ("", "undefined")),
    ],
)
def test_families(capability: str, name: str) -> None:
    """By compute capability."""
    assert family(capability) == name
