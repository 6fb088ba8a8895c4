# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a node including those that the driver has lost; pure.

The driver does not list a GPU that has fallen off the bus. Its units stay, so that the kubelet
sees them as unhealthy and not as another size of the node.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from gpunode.model import NodeModel


def with_lost(model: NodeModel, before: NodeModel | None, lost: Collection[str]) -> NodeModel:
    """Return *model* with the GPUs that only *before* has and that are *lost*, by UUID."""
    if before is None:
        return model
    present = {gpu.gpu.uuid for gpu in model.gpus}
    missing = [gpu for gpu in before.gpus if gpu.gpu.uuid in lost and gpu.gpu.uuid not in present]
    if not missing:
        return model
    gpus = sorted((*model.gpus, *missing), key=lambda gpu: (gpu.gpu.index, gpu.gpu.uuid))
    return replace(model, gpus=tuple(gpus))
