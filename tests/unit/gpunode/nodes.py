# SPDX-License-Identifier: Apache-2.0
"""GPUs of a node, for the tests of what is derived from them."""

from __future__ import annotations

from gpunode.model import MigAttributes, NodeGpu, NodeMigDevice
from gpuruntime.model import Gpu, MigDevice

A100, T4 = "NVIDIA A100-SXM4-40GB", "Tesla T4"


def gpu(index: int, name: str = A100, profiles: tuple[str, ...] | None = None) -> NodeGpu:
    """Return a GPU; with *profiles* it has MIG enabled, and these MIG devices.

    Its UUID is `GPU-<index>`, those of its MIG devices are `MIG-<index>-<number>`.
    """
    migs = tuple(
        NodeMigDevice(
            MigDevice(
                index=number, uuid=f"MIG-{index}-{number}", gpu_instance=number, compute_instance=0
            ),
            MigAttributes(
                profile,
                *(int(profile[0]), int(profile[0]), 4864),
                *(number, int(profile[0])),
                multiprocessors=14,
            ),
        )
        for number, profile in enumerate(profiles or ())
    )
    plain = Gpu(
        index=index,
        uuid=f"GPU-{index}",
        minor=index,
        name=name,
        bus_id=f"0000:0{index}:00.0",
        architecture="8.0" if name == A100 else "7.5",
        mig_enabled=profiles is not None,
        mig_devices=tuple(mig.device for mig in migs),
    )
    return NodeGpu(plain, 40960, mig_capable=name == A100, mig_devices=migs)
