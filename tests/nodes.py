# SPDX-License-Identifier: Apache-2.0
"""Models of nodes with GPUs for tests: GPUs, MIG devices, links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpunode.model import Link, MigAttributes, NodeGpu, NodeMigDevice, NodeModel, Topology
from gpuruntime.model import Driver, Gpu, GpuNodes, Inventory, MigDevice, Node


def uuid(index: int) -> str:
    """Return the UUID of the GPU *index*."""
    return f"GPU-{index:08x}-0000-4000-8000-000000000000"


def mig_uuid(index: int, mig_index: int) -> str:
    """Return the UUID of the MIG device *mig_index* of the GPU *index*."""
    return f"MIG-{index:08x}-{mig_index:04x}-4000-8000-000000000000"


def gpu(
    index: int,
    *,
    mig: Sequence[str] | None = None,
    numa: int | None = None,
    name: str = "NVIDIA A100",
    architecture: str = "8.0",
) -> NodeGpu:
    """Return the GPU *index*; *mig* are the profiles of its MIG devices, None without MIG mode."""
    profiles = mig or ()
    devices = tuple(
        MigDevice(index=i, uuid=mig_uuid(index, i), gpu_instance=i + 1, compute_instance=0)
        for i in range(len(profiles))
    )
    return NodeGpu(
        Gpu(
            index=index,
            uuid=uuid(index),
            minor=index,
            name=name,
            bus_id=f"0000:{index + 1:02x}:00.0",
            mig_enabled=mig is not None,
            mig_devices=devices,
            architecture=architecture,
        ),
        memory_mib=40960,
        numa_node=numa,
        mig_capable=mig is not None,
        mig_devices=tuple(
            NodeMigDevice(device, attributes(profile))
            for device, profile in zip(devices, profiles, strict=True)
        ),
    )


def attributes(profile: str) -> MigAttributes:
    """Return the size of a MIG device of *profile*, `1g.5gb` or `1c.2g.10gb`."""
    parts = profile.split(".")
    slices = [int(part[0]) for part in parts if part[1:] in ("g", "c")]
    memory = int(parts[-1].partition("gb")[0]) * 1024
    return MigAttributes(
        profile, gpu_slices=slices[-1], compute_slices=slices[0], memory_mib=memory
    )


def model(*gpus: NodeGpu, links: Mapping[tuple[int, int], int | Link] | None = None) -> NodeModel:
    """Return a node of *gpus*; *links* has NVLinks, or a Link, by pair of indices.

    A pair holds in both directions unless the other direction is in *links* too.
    """
    links = links or {}
    pairs: dict[tuple[str, str], Link] = {}
    for a in gpus:
        for b in gpus:
            i, j = a.gpu.index, b.gpu.index
            if i != j:
                link = links.get((i, j), links.get((j, i), 0))
                if isinstance(link, int):
                    link = Link(Topology.SYSTEM, link)
                pairs[a.gpu.uuid, b.gpu.uuid] = link
    return NodeModel("550.54.15", "12.4", gpus, pairs, inventory=inventory(*gpus))


def inventory(*gpus: NodeGpu, root: str = "", control: Sequence[str] = ()) -> Inventory:
    """Return the inventory of *gpus* with device nodes below *root*."""

    def node(path: str) -> Node:
        return Node(host_path=f"{root}{path}", container_path=path)

    names = control or ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
    return Inventory(
        driver=Driver(version="550.54.15", libraries=(), files=()),
        gpus=tuple(
            GpuNodes(
                gpu=item.gpu,
                node=node(f"/dev/nvidia{item.gpu.minor}"),
                mig=tuple(
                    (
                        mig,
                        node(f"/dev/nvidia-caps/nvidia-cap{100 * item.gpu.index + 2 * i + 1}"),
                        node(f"/dev/nvidia-caps/nvidia-cap{100 * item.gpu.index + 2 * i + 2}"),
                    )
                    for i, mig in enumerate(item.gpu.mig_devices)
                ),
            )
            for item in gpus
        ),
        control_nodes=tuple(node(f"/dev/{name}") for name in names),
        features={"imex": (node("/dev/nvidia-caps-imex-channels/channel0"),)},
    )
