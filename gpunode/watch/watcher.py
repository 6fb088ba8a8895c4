# SPDX-License-Identifier: Apache-2.0
"""The watcher: keeps what the child reports of the driver, and tells its consumers.

All methods are those of one event loop. None waits for the driver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

from gpunode.model import DriverState, Event, NodeModel, Telemetry, Update
from gpunode.watch import wire
from gpunode.watch.changes import History
from gpunode.watch.child_handle import ChildHandle
from gpunode.watch.framing import FrameError
from gpunode.watch.streams import Streams
from gpunode.watch.supervision import Action, Settings, Supervision

# A child that hangs and has no parent ends after this many deadlines.
_LIMIT = 3


class Watcher:
    """The watcher of the driver below *driver_root*, with device nodes below *dev_root*.

    *proc* and *sys* are the directories of the kernel's files, *clock* is the monotonic clock.
    The watcher runs while it is entered as an asynchronous context.
    """

    def __init__(
        self,
        *,
        driver_root: str = "/",
        dev_root: str = "/",
        proc: str = "/proc",
        sys: str = "/sys",
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or Settings()
        self._options = {
            "driver_root": driver_root,
            "dev_root": dev_root,
            "proc": proc,
            "sys": sys,
            "retry_s": self._settings.retry_s,
            "limit_s": self._settings.first_deadline_s * _LIMIT,
        }
        self._clock = clock
        self._supervision = Supervision(self._settings, clock())
        self._history = History()
        self._model: NodeModel | None = None
        self._telemetry: Telemetry | None = None
        self._telemetry_time = 0.0
        self._child: ChildHandle | None = None
        self._abandoned: list[ChildHandle] = []
        self._timer: asyncio.TimerHandle | None = None
        self._streams = Streams(lambda: self.current)
        self._ended = asyncio.Event()
        self._is_closing = False

    async def __aenter__(self) -> Self:
        self._advance()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._streams.end()
        child = self._child
        if child is not None:
            # A child that is idle ends by itself.
            child.end()
            await _wait(self._ended, self._settings.grace_s)
            child.kill()
            await _wait(self._ended, self._settings.grace_s)
            child.release()
        for abandoned in self._abandoned:
            abandoned.release()

    @property
    def current(self) -> Update:
        """The last update, without events."""
        return Update(self._supervision.status, self._model)

    @property
    def child_pid(self) -> int | None:
        """The process id of the child, None while there is none."""
        return self._child.pid if self._child else None

    def updates(self) -> AsyncIterator[Update]:
        """Yield the current state, then an update after each change, until the watcher ends.

        A consumer that is slow gets the newest state, with all events since its last update.
        """
        return self._streams.updates()

    async def hold(self) -> None:
        """End the child, and start none until `resume`: nothing here uses the driver then.

        The last state remains. Returns after a time limit though the child may wait in the driver.
        """
        self._supervision.hold()
        self._advance()
        child = self._child
        if child is not None:
            child.end()
            await _wait(self._ended, self._settings.grace_s)
            if self._child is child:
                child.kill()
                await _wait(self._ended, self._settings.grace_s)

    def resume(self) -> None:
        """Start a child again, which is asked at once."""
        self._supervision.resume(self._clock(), is_hanging=self._child is not None)
        self._advance()

    def request_telemetry(self) -> Telemetry | None:
        """Return the last measurements, None before the first; have them made from now on.

        They are made with each poll for a while after the last call.
        """
        now = self._clock()
        self._supervision.request_telemetry(now)
        self._advance()
        if self._telemetry is None:
            return None
        return Telemetry(now - self._telemetry_time, self._telemetry.devices)

    def _advance(self) -> None:
        """Do what is due, and set the timer for what is due next."""
        if self._is_closing:
            return
        before = self._supervision.status
        while (action := self._supervision.advance(self._clock())) is not None:
            self._do(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._supervision.due
        if due != float("inf"):
            delay_s = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._advance)
        if self._supervision.status != before:
            self._streams.publish(())

    def _do(self, action: Action) -> None:
        now = self._clock()
        if action is Action.KILL:
            if self._child is not None:
                self._child.kill()
            return
        if action is Action.START:
            self._abandon()
            try:
                self._child = self._start()
            except OSError as error:
                reason = f"cannot start the process that calls NVML: {error.strerror}"
                self._supervision.start_failed(now, reason)
                return
        if self._child is not None:
            self._child.send({"telemetry": self._supervision.wants_telemetry(now)})

    def _start(self) -> ChildHandle:
        child: ChildHandle

        def is_current() -> bool:
            return child is self._child

        def on_message(message: Any) -> None:  # noqa: ANN401 (JSON)
            if is_current():
                self._receive(message)

        def on_broken(reason: str) -> None:
            if is_current():
                self._break(reason)

        def on_end(how: str) -> None:
            if is_current():
                self._child = None
                self._ended.set()
                if self._is_closing:
                    return
                before = self._supervision.status
                self._supervision.ended(self._clock(), how)
                self._advance_from(before)
            elif child in self._abandoned:
                self._abandoned.remove(child)
                self._supervision.abandoned_ended(self._clock())
                self._advance()

        self._ended.clear()
        child = ChildHandle(self._options, on_message, on_broken, on_end)
        return child

    def _abandon(self) -> None:
        """Leave a child that was killed and has not ended to its fate."""
        if self._child is not None:
            self._child.ignore()
            self._abandoned.append(self._child)
            self._child = None

    def _receive(self, message: object) -> None:
        now = self._clock()
        try:
            content = wire.decode(message, now)
        except FrameError as error:
            self._break(str(error))
            return
        if isinstance(content, Event):
            self._streams.publish((content,))
        elif isinstance(content, wire.Changed):
            self._supervision.changed(now)
            self._advance()
        else:
            self._note(content, now)

    def _note(self, answer: wire.Answer, now: float) -> None:
        before = self._supervision.status
        self._supervision.answered(now, answer)
        events: tuple[Event, ...] = ()
        if answer.state is DriverState.READY:
            events = self._history.note(answer, now)
        if answer.telemetry is not None:
            self._telemetry = Telemetry(0.0, answer.telemetry)
            self._telemetry_time = now
        has_news = answer.model is not None and answer.model != self._model
        if answer.model is not None:
            self._model = answer.model
        if has_news or events:
            self._streams.publish(events)
            self._advance()
        else:
            self._advance_from(before)

    def _break(self, reason: str) -> None:
        before = self._supervision.status
        self._do(self._supervision.broken(self._clock(), reason))
        self._advance_from(before)

    def _advance_from(self, before: object) -> None:
        """Advance, and publish the status if it is not that of *before*."""
        if self._supervision.status != before:
            self._streams.publish(())
        self._advance()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
