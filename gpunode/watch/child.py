# SPDX-License-Identifier: Apache-2.0
"""The watcher's child: the only process that calls NVML.

It answers the requests on its standard input, and sends events when the driver reports them. It
ends when the driver was replaced or loaded again, for a library stays in a process that has loaded
it; the parent then starts another. A thread waits for events, because that call blocks.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

from gpunode.watch import framing
from gpunode.watch.event_thread import EventThread
from gpunode.watch.session import Session
from gpuruntime import errors, probes, remedies
from gpuruntime.discover import fingerprint, nvml
from gpuruntime.discover.driver_errors import AbsentDriverError, MismatchedDriverError
from gpuruntime.discover.nvml_calls import NvmlError
from gpuruntime.errors import DiscoveryError, GpuRuntimeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuruntime.probes import State

# Parts of the fingerprint after whose change this process cannot use the driver.
_DRIVER_PARTS = frozenset({"driver root", "modules", "module version", "libraries"})


def main(options: dict[str, Any]) -> None:
    """Serve until the end of standard input; *options* are those of a `ChildHandle`."""
    _detach()
    Child(options, 0, 1).serve()
    # The thread that waits for events, and the exit handlers of NVML, may block.
    os._exit(0)


def _detach() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 2)
    os.chdir("/")
    # NVML may start nvidia-modprobe and wait for it.
    os.environ.clear()
    os.environ.update({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"})
    for number in (signal.SIGALRM, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # The parent ends this process; the terminal's interrupt is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Child:
    """Requests from the descriptor *reader* are answered on the descriptor *writer*."""

    def __init__(self, options: dict[str, Any], reader: int, writer: int) -> None:
        self._driver_root: str = options["driver_root"]
        self._dev_root: str = options["dev_root"]
        self._proc: str = options["proc"]
        self._sys: str = options["sys"]
        self._limit_s: float = options["limit_s"]
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._state: State | None = None
        self._failure: dict[str, Any] | None = None
        self._retry_s: float = options["retry_s"]
        # When another process tries again what this one cannot do, None if all is well.
        self._retry_time: float | None = None

    def serve(self) -> None:
        """Answer requests until the end of input, or until another process must take over."""
        while (request := framing.read(self._reader)) is not None:
            # The alarm ends this process if it hangs and its parent no longer exists.
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)
            answer = self._answer(request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.send({"answer": answer})
            if answer["ends"]:
                return

    def send(self, message: dict[str, Any]) -> None:
        """Send *message*, from any thread."""
        with self._lock:
            try:
                framing.write(self._writer, message)
            except OSError:
                # The parent has ended.
                os._exit(1)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            has_telemetry = request["telemetry"]
            if self._session is None:
                return self._first_answer(has_telemetry=has_telemetry)
            return self._next_answer(self._session, has_telemetry=has_telemetry)
        except NvmlError as error:
            library = self._session.library if self._session else ""
            return _not_ready(nvml.failure(library, str(error), error.code, self._proc), ends=True)
        except GpuRuntimeError as error:
            return _not_ready(error, ends=True)
        except Exception as error:  # noqa: BLE001 (the parent reports it)
            return _not_ready(errors.bug(error), ends=True)

    def _first_answer(self, *, has_telemetry: bool) -> dict[str, Any]:
        """Return the first survey; after a failure, the failure and whether to try again."""
        if self._failure is not None:
            ends = bool(self._changes()) or self._is_retry_due(is_wanted=True)
            return {**self._failure, "ends": ends}
        self._remember_host()
        session = Session(self._driver_root, self._dev_root, self._proc, self._sys)
        self._session = session
        try:
            model = session.survey()
        except GpuRuntimeError as error:
            self._session = None
            self._failure = _not_ready(error, ends=False)
            return self._failure
        EventThread(session.nvml, self.send, lambda: session.lost_uuids).start_waiting()
        return self._ready(session, model, session.measure() if has_telemetry else None)

    def _next_answer(self, session: Session, *, has_telemetry: bool) -> dict[str, Any]:
        changes = self._changes()
        if not _DRIVER_PARTS.isdisjoint(changes):
            return {**self._ready(session, None, None), "ends": True}
        model = None
        if changes or session.has_changed():
            self._remember_host()
            model = session.survey()
        answer = self._ready(session, model, session.measure() if has_telemetry else None)
        # A GPU that is lost to a process may be there for another.
        return {**answer, "ends": self._is_retry_due(is_wanted=session.has_lost_gpu)}

    def _is_retry_due(self, *, is_wanted: bool) -> bool:
        """Return whether *is_wanted* has been true, without a break, for the time of a retry."""
        if not is_wanted:
            self._retry_time = None
        elif self._retry_time is None:
            self._retry_time = time.monotonic() + self._retry_s
        return self._retry_time is not None and time.monotonic() >= self._retry_time

    def _ready(
        self, session: Session, model: dict[str, Any] | None, measurements: list[Any] | None
    ) -> dict[str, Any]:
        # Discovery leaves garbage several times the size of its result.
        if model is not None:
            gc.collect()
        return {
            "state": "ready",
            "reason": "",
            "hint": "",
            "model": model,
            "energy": session.energy,
            "load": session.load,
            "telemetry": measurements,
            "ends": False,
        }

    def _remember_host(self) -> None:
        try:
            plan = fingerprint.plan(
                self._driver_root,
                self._dev_root,
                environment=False,
                proc=self._proc,
                sys=self._sys,
            )
        except DiscoveryError:
            self._state = None
        else:
            self._state = probes.read(plan)

    def _changes(self) -> list[str]:
        """Return the parts of the host that have changed since the last survey.

        A newer version of this program is not one: the parent would not understand it.
        """
        if self._state is None:
            return [] if not os.path.isdir(self._driver_root) else ["driver root"]
        return [part for part in probes.changed(self._state) if part != probes.PROGRAM]


def _not_ready(error: GpuRuntimeError, *, ends: bool) -> dict[str, Any]:
    state = "failed"
    if isinstance(error, AbsentDriverError):
        state = "absent"
    elif isinstance(error, MismatchedDriverError):
        state = "mismatched"
    hint = error.hint or ""
    if hint == remedies.ALLOW_MISSING_GPU:
        hint = "select only nodes with GPUs for this program"
    return {
        "state": state,
        "reason": errors.escape(error.message),
        "hint": errors.escape(hint),
        "model": None,
        "energy": {},
        "load": "",
        "telemetry": None,
        "ends": ends,
    }
