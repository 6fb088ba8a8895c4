# SPDX-License-Identifier: Apache-2.0
"""The events that follow from two answers of the driver: lost, back, reset, MIG, driver.

Values in, values out: the history outlives the child processes whose answers it compares.
"""

from __future__ import annotations

from gpunode.model import Event, EventKind, NodeGpu, NodeModel
from gpunode.watch.wire import Answer


class History:
    """The GPUs and the load of the driver that have been reported."""

    def __init__(self) -> None:
        self._gpus: dict[str, NodeGpu] = {}
        self._lost: set[str] = set()
        self._energy: dict[str, int] = {}
        self._load: str | None = None
        self._version = ""

    def note(self, answer: Answer, time: float) -> tuple[Event, ...]:
        """Return the events that *answer*, of a driver that is ready, shows at *time*."""
        events: list[Event] = []
        is_reloaded = self._load is not None and answer.load != self._load
        self._load = answer.load
        if is_reloaded:
            # All GPUs have been initialised again, and count from zero.
            self._energy = {}
        if answer.model is not None:
            version = answer.model.driver_version
            if is_reloaded or self._version not in ("", version):
                text = f"driver {self._version} before, {version} now"
                events.append(Event(EventKind.DRIVER_CHANGED, time, text=text))
            self._version = version
            events += self._compared(answer.model, time)
        for uuid, energy in answer.energy.items():
            if energy < self._energy.get(uuid, 0):
                text = "the GPU counts its energy from zero again"
                events.append(Event(EventKind.RESET, time, uuid, text=text))
        self._energy |= answer.energy
        return tuple(events)

    def _compared(self, model: NodeModel, time: float) -> list[Event]:
        events = []
        gpus = {gpu.gpu.uuid: gpu for gpu in model.gpus}
        for uuid in self._gpus.keys() - gpus.keys() - self._lost:
            text = _reason(model, self._gpus[uuid])
            events.append(Event(EventKind.LOST, time, uuid, text=text))
            self._lost.add(uuid)
        for uuid, gpu in gpus.items():
            if uuid in self._lost:
                self._lost.remove(uuid)
                events.append(Event(EventKind.BACK, time, uuid))
            before = self._gpus.get(uuid)
            if before is not None and _mig(before) != _mig(gpu):
                events.append(Event(EventKind.MIG_CHANGED, time, uuid, text=_mig_text(gpu)))
        self._gpus |= gpus
        return sorted(events, key=lambda event: (event.kind.value, event.uuid))


def _mig(gpu: NodeGpu) -> tuple[object, ...]:
    return gpu.gpu.mig_enabled, gpu.mig_pending, gpu.mig_devices


def _mig_text(gpu: NodeGpu) -> str:
    if gpu.mig_pending is not None:
        return f"MIG mode is {'on' if gpu.mig_pending else 'off'} after the next reset"
    if not gpu.gpu.mig_enabled:
        return "MIG mode is off"
    profiles = ", ".join(mig.attributes.profile for mig in gpu.mig_devices)
    return f"MIG devices: {profiles or 'none'}"


def _reason(model: NodeModel, gpu: NodeGpu) -> str:
    """Return why *gpu* is not in *model*."""
    names = {gpu.gpu.uuid, gpu.gpu.bus_id, str(gpu.gpu.index)}
    for device in model.left_out:
        # The most certain of its names that is known.
        if (device.uuid or device.bus_id or device.name) in names:
            return device.reason
    return "NVML does not list it"
