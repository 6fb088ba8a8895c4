# SPDX-License-Identifier: Apache-2.0
"""The thread of the watcher's child that waits for the driver's events and sends them."""

from __future__ import annotations

import threading
import time

from gpuruntime.discover.nvml_calls import (
    GONE,
    LOST,
    NOT_SUPPORTED,
    NvmlError,
    address_of,
    unless_error,
)
from gpuruntime.errors import escape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from gpuruntime.discover.nvml_calls import Nvml

_XID_EVENTS = 8
_NO_INSTANCE = 0xFFFFFFFF
# A value of nvmlReturn_t: there was no event.
_TIMEOUT = 10
# How long one call waits. Then GPUs that have come back are registered.
_WAIT_MS = 10_000
# How long the first registration may take.
_START_S = 2.0
# How long to wait after a failed call.
_PAUSE_S = 1.0


class EventThread(threading.Thread):
    """Sends the events of *nvml* by *send*, until the process ends.

    *lost* returns the UUIDs of the GPUs that are lost: a wait for their events fails at once.
    """

    def __init__(
        self,
        nvml: Nvml,
        send: Callable[[dict[str, Any]], None],
        lost: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(daemon=True)
        self._nvml = nvml
        self._send = send
        self._lost = lost
        # The address of a handle → the UUID of its GPU, for a lost GPU does not tell its UUID.
        self._uuids: dict[int | None, str] = {}
        # UUIDs of GPUs whose events cannot be requested, which has been reported.
        self._failed: set[str] = set()
        self._has_failed = False
        self._has_started = threading.Event()

    def start_waiting(self) -> None:
        """Start the thread, and return when it misses no more events, or cannot wait for them."""
        self.start()
        self._has_started.wait(_START_S)

    def run(self) -> None:
        """Send events for ever."""
        while True:
            try:
                self._send_while_registered()
            except NvmlError as error:
                if error.code in LOST | GONE:
                    # The next poll says what is gone, and comes at once.
                    self._send({"changed": True})
                elif not self._has_failed:
                    self._has_failed = True
                    self._send_event("wait-failed", text=str(error))
                self._has_started.set()
                time.sleep(_PAUSE_S)

    def _send_while_registered(self) -> None:
        """Send events until another GPU can be registered; raise NvmlError."""
        events = self._nvml.ask("nvmlEventSetCreate")
        try:
            registered = self._register(events)
            self._has_started.set()
            while True:
                data = self._wait(events)
                if data is not None and data.eventType == _XID_EVENTS:
                    self._send_xid(data)
                if data is None and set(self._gpus()) - registered - self._failed:
                    return
        finally:
            unless_error(self._nvml.ask, "nvmlEventSetFree", events)

    def _wait(self, events: object) -> Any:  # noqa: ANN401 (a structure of pynvml)
        """Return the next event, None if there was none for a while; raise NvmlError."""
        try:
            data = self._nvml.ask("nvmlEventSetWait_v2", events, _WAIT_MS)
        except NvmlError as error:
            if error.code != _TIMEOUT:
                raise
            data = None
        self._has_failed = False
        return data

    def _gpus(self) -> dict[str, Any]:
        """Return UUID → handle of the GPUs that answer; raise NvmlError."""
        gpus = {}
        for index in range(self._nvml.ask("nvmlDeviceGetCount")):
            device = unless_error(self._nvml.ask, "nvmlDeviceGetHandleByIndex", index)
            uuid = device and unless_error(self._nvml.text, "nvmlDeviceGetUUID", device)
            if uuid and uuid not in self._lost():
                gpus[uuid] = device
        return gpus

    def _register(self, events: object) -> set[str]:
        """Register all GPUs that answer, and return their UUIDs."""
        registered = set()
        for uuid, device in self._gpus().items():
            self._uuids[address_of(device)] = uuid
            try:
                self._nvml.ask("nvmlDeviceRegisterEvents", device, _XID_EVENTS, events)
            except NvmlError as error:
                if error.code not in LOST and uuid not in self._failed:
                    self._failed.add(uuid)
                    is_unsupported = error.code == NOT_SUPPORTED
                    kind = "events-unsupported" if is_unsupported else "events-failed"
                    self._send_event(kind, uuid=uuid, text=str(error))
            else:
                registered.add(uuid)
        return registered

    def _send_xid(self, data: Any) -> None:  # noqa: ANN401 (a structure of pynvml)
        uuid = self._uuids.get(address_of(data.device))
        if uuid is None and data.device:
            uuid = unless_error(self._nvml.text, "nvmlDeviceGetUUID", data.device)
        self._send_event(
            "xid",
            uuid=uuid or "",
            xid=data.eventData,
            gpu_instance=_instance(data.gpuInstanceId),
            compute_instance=_instance(data.computeInstanceId),
        )

    def _send_event(
        self,
        kind: str,
        *,
        uuid: str = "",
        xid: int = 0,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
        text: str = "",
    ) -> None:
        event = {
            "kind": kind,
            "uuid": uuid,
            "xid": xid,
            "gpu_instance": gpu_instance,
            "compute_instance": compute_instance,
            "text": escape(text),
        }
        self._send({"event": event})


def _instance(number: int) -> int | None:
    return None if number == _NO_INSTANCE else number
