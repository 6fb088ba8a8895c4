# SPDX-License-Identifier: Apache-2.0
"""Which pods use which devices."""

from __future__ import annotations

import pytest
from unit.gpunode.nodes import gpu

from gpunode.pod_devices import Claim, Container, Uses

NODE = (gpu(0), gpu(1), gpu(2, profiles=("1g.5gb", "1g.5gb+me")))


def claim(device: str, driver: str = "gpu.nvidia.com") -> Claim:
    """Return a claim's device."""
    return Claim("c", "ns", driver, "node", device)


@pytest.mark.parametrize(
    ("resource", "name", "uuid", "share"),
    [
        ("nvidia.com/gpu", "GPU-1", "GPU-1", ""),
        # Complaint 27: shared units and MIG devices.
        ("nvidia.com/gpu.shared", "GPU-0::3", "GPU-0", "3"),
        ("nvidia.com/mig-1g.5gb", "MIG-2-0", "MIG-2-0", ""),
        ("nvidia.com/mig-1g.5gb", "MIG-2-0::1", "MIG-2-0", "1"),
        ("nvidia.com/gpu", "nvidia1", "GPU-1", ""),
        ("nvidia.com/gpu", "nvidia2/gi1", "MIG-2-1", ""),
        ("nvidia.com/gpu", "nvidia0/vgpu3", "GPU-0", "3"),
        ("nvidia.com/gpu", "nvidia2/gi0/vgpu1", "MIG-2-0", "1"),
        ("vendor.example/gpu", "GPU-1", "GPU-1", ""),
    ],
)
def test_the_names_of_plugins(resource: str, name: str, uuid: str, share: str) -> None:
    """Each form is resolved to the UUID of the node's device."""
    container = Container("ns", "pod", "main", ((resource, (name, name)),))
    uses = Uses(NODE, [container], ["vendor.example/gpu"])
    assert [(use.pod, use.container, use.share) for use in uses.of(uuid)] == [
        ("pod", "main", share)
    ]
    assert not uses.unresolved


@pytest.mark.parametrize(
    ("device", "uuid"),
    [
        ("gpu-1", "GPU-1"),
        ("gpu-2-mig-1g5gb-19-0", "MIG-2-0"),
        ("gpu-2-mig-1g5gb-me-20-1", "MIG-2-1"),
    ],
)
def test_the_names_of_claims(device: str, uuid: str) -> None:
    """As the DRA driver publishes them."""
    uses = Uses(NODE, [Container("ns", "pod", "main", claims=(claim(device),))])
    assert [use.claim for use in uses.of(uuid)] == [claim(device)]


def test_several_pods_share_a_gpu() -> None:
    """Each has a use of its own, in a stable order."""
    containers = [
        Container("ns", name, "main", (("nvidia.com/gpu", (f"GPU-0::{share}",)),))
        for share, name in enumerate(("b", "a"))
    ]
    uses = [Uses(NODE, order).of("GPU-0") for order in (containers, containers[::-1])]
    assert uses[0] == uses[1]
    assert [(use.pod, use.share) for use in uses[0]] == [("a", "1"), ("b", "0")]


def test_names_of_no_device_are_listed() -> None:
    """Devices of other resources and drivers are not ours."""
    strange = ("GPU-9", "nvidia7", "nvidia2/gi9", "x" * 99, "", "::1", "nvidia0/gi٣")
    container = Container(
        *("ns", "pod", "main"),
        (("nvidia.com/gpu", strange), ("example.com/nic", ("nic-0",))),
        (claim("gpu-9"), claim("gpu-2-mig-1g5gb-19-5"), claim("x", "dra.example")),
    )
    assert Uses(NODE, [container]).unresolved == [*strange, "gpu-9", "gpu-2-mig-1g5gb-19-5"]
