# SPDX-License-Identifier: Apache-2.0
"""The manager of MIG as a service: a thread does the work, the event loop watches the node.

The thread may block, so it does not keep the process from ending: what it has begun is on disk,
and the next start ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from gpunode.api.errors import ApiServerError
from gpunode.mig.manager import Manager
from gpunode.services.healthz import Report
from gpunode.services.observation import Holdable
from gpunode.services.turns import Turns
from gpuruntime.errors import bug

log = logging.getLogger(__name__)

_STOP_S = 4.0
_RETRY_S = 10.0
# More than a watcher needs, whose child may hang.
_HOLD_S = 30.0


@dataclass(frozen=True, slots=True)
class Signals:
    """What the thread waits for: the end of the service, and a change of the node."""

    stop: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)


Hold = Callable[[], AbstractContextManager[None]]


class MigManager:
    """The service; *make* returns the manager that heeds some signals, and holds the watcher.

    *values* yields after each change of the label of the config. *watcher* is that of other
    services in this process.
    """

    def __init__(
        self,
        make: Callable[[Signals, Hold], Manager],
        values: Callable[[], AsyncIterator[object]],
        watcher: Holdable | None = None,
    ) -> None:
        self._values = values
        self._signals = Signals()
        self._watcher = watcher
        self._loop: asyncio.AbstractEventLoop | None = None
        self.manager = make(self._signals, self._hold)
        self.turns = Turns()
        self._crash: Exception | None = None
        self._watch_problem = ""

    async def serve(self) -> None:
        """Serve until `turns` ends; raise GpuRuntimeError for a bug."""
        self._loop = loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._work, args=(loop, ended), daemon=True).start()
        signals = asyncio.ensure_future(self._take_signals())
        watching = asyncio.ensure_future(self._watch())
        try:
            # The future is never cancelled: the thread sets its result.
            await asyncio.wait({ended, signals}, return_when=asyncio.FIRST_COMPLETED)
            self._end()
            await asyncio.wait({ended}, timeout=_STOP_S)
        finally:
            self._end()
            signals.cancel()
            watching.cancel()
            await asyncio.gather(signals, watching, return_exceptions=True)
        if self._crash is not None:
            raise bug(self._crash) from self._crash
        if not ended.done():
            log.warning("a change of MIG is cut off: the next start ends it")

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        """Hold the watcher, from the thread of the manager."""
        if self._watcher is None or self._loop is None:
            yield
            return
        held = asyncio.run_coroutine_threadsafe(self._watcher.hold(), self._loop)
        try:
            held.result(_HOLD_S)
            yield
        finally:
            # The loop may have been closed meanwhile.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._watcher.resume)

    async def _take_signals(self) -> None:
        while await self.turns.next_signal():
            self.manager.reload()

    def _end(self) -> None:
        self._signals.stop.set()
        self._signals.wake.set()

    def _work(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        try:
            self.manager.run()
        except Exception as error:  # noqa: BLE001 (raised again by serve)
            self._crash = error
        # The loop may have been closed meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set_result, None)

    async def _watch(self) -> None:
        """Wake the manager when the label of the config changes; it also looks by itself."""
        while True:
            try:
                async for _ in self._values():
                    self._watch_problem = ""
                    self._signals.wake.set()
            except ApiServerError as error:
                if self._watch_problem != error.message:
                    log.warning("%s", error.lines())
                self._watch_problem = error.message
            await asyncio.sleep(_RETRY_S)

    def report(self) -> Report:
        """Return the state of the service for probes."""
        state = self.manager.state
        obstacle = self.manager.obstacle
        details = {
            "config": self.manager.config_name,
            "state": state.value if state else "",
            "problem": self.manager.problem,
            "watch": self._watch_problem or "ok",
        }
        return Report((obstacle,) if obstacle else (), details)
