# SPDX-License-Identifier: Apache-2.0
"""What the MPS control daemons of a node are set to: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpunode.config.sharing import SharingKind
from gpunode.devices import Offer
from gpunode.model import NodeModel

_WHOLE_PERCENT = 100


@dataclass(frozen=True, slots=True)
class Daemon:
    """The control daemon of the resource *name*.

    *memory_mib* is the limit of a client by the index of its GPU, *thread_percent* its share of
    the threads.
    """

    name: str
    uuids: tuple[str, ...]
    memory_mib: Mapping[str, int]
    thread_percent: int

    def commands(self) -> tuple[str, ...]:
        """Return the lines that set the limits, in their order."""
        memory = (
            f"set_default_device_pinned_mem_limit {index} {limit}M"
            for index, limit in self.memory_mib.items()
        )
        return (*memory, f"set_default_active_thread_percentage {self.thread_percent}")


def daemons(offer: Offer, model: NodeModel) -> tuple[Daemon, ...]:
    """Return the daemons that the resources of *offer* need."""
    memory = {gpu.gpu.uuid: gpu.memory_mib for gpu in model.gpus}
    result = []
    for resource in offer.resources:
        if resource.sharing is not SharingKind.MPS:
            continue
        counts: dict[str, int] = {}
        for unit in resource.units:
            if unit.replica is not None:
                counts[unit.device.uuid] = counts.get(unit.device.uuid, 0) + 1
        shared = [device for device in resource.devices if device.uuid in counts]
        limits = {}
        for device in shared:
            size = memory.get(device.uuid)
            # Without its size, the memory of a GPU cannot be limited.
            if size is not None:
                limits[device.index] = size // counts[device.uuid]
        percent = _WHOLE_PERCENT // max(counts.values())
        result.append(Daemon(resource.name, tuple(d.uuid for d in shared), limits, percent))
    return tuple(result)
