# SPDX-License-Identifier: Apache-2.0
"""The whole spec of each distribution's layout: a change of the generator shows itself in review.

`GPURUNTIME_WRITE_GOLDEN=1` writes the files anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from driver_roots import LAYOUTS, build

from cdi import advice, generate
from gpuruntime.discover.user_space import DriverRoot, find_driver
from gpuruntime.model import Gpu, GpuNodes, MigDevice, Node
from gpuruntime.plan import devices, gpu_edits

GOLDEN = Path(__file__).parents[3] / "data" / "golden"
STYLE = gpu_edits.Style("/usr/bin/gpu-cdi-hook")


def node(path: str) -> Node:
    """Return a node of the host's own /dev."""
    return Node(host_path=path, container_path=path)


def gpus() -> list[GpuNodes]:
    """Return a full GPU, and one in MIG mode with an instance."""
    mig = MigDevice(index=0, uuid="MIG-1", gpu_instance=1, compute_instance=0)
    nodes = (node("/dev/nvidia-caps/nvidia-cap12"), node("/dev/nvidia-caps/nvidia-cap13"))
    return [
        GpuNodes(
            gpu=Gpu(index=0, uuid="GPU-0", minor=1, name="x"),
            node=node("/dev/nvidia1"),
            drm=(node("/dev/dri/card1"), node("/dev/dri/renderD129")),
            links=("../card1::/dev/dri/by-path/pci-0000:01:00.0-card",),
        ),
        GpuNodes(
            gpu=Gpu(
                index=1, uuid="GPU-1", minor=0, name="x", mig_enabled=True, mig_devices=(mig,)
            ),
            node=node("/dev/nvidia0"),
            mig=((mig, *nodes),),
        ),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_golden_spec_of_a_layout(layout: str, tmp_path: Path) -> None:
    """Sorted, explicit permissions, read-only mounts, hooks with environment and deadline."""
    tree = build(tmp_path / "root", layout)
    native = "aarch64" if layout == "aarch64" else "x86-64"
    driver = find_driver(DriverRoot(str(tree.path)), native=native, kernel_release="6.1.0")
    found = devices.devices(["all"], gpus())
    control = [node(f"/dev/{name}") for name in ("nvidia-uvm", "nvidiactl")]
    spec = generate.spec(
        "nvidia.com/gpu",
        gpu_edits.named_devices(found, (devices.INDEX, devices.UUID), STYLE),
        gpu_edits.common_edits(driver, control, found[0].gpu.links, STYLE),
    )
    assert {problem.category for problem in advice.check(spec)} <= {"mount-writable"}
    text = generate.encode(spec, "yaml").replace(str(tree.path), "/driver-root")
    golden = GOLDEN / f"{layout}.yaml"
    if os.environ.get("GPURUNTIME_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
