# SPDX-License-Identifier: Apache-2.0
"""What a service waits for: updates of the watcher, signals, and a time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Any

from gpunode.model import Update
from gpunode.services.observation import Observed

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Turn:
    """One reason to work: *update* is the state of the driver, with events if it is new.

    *is_reload* says that the config is to be read again.
    """

    update: Update
    is_reload: bool = False


class Turns:
    """The turns of a service, until a signal or `stop` ends them."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._reload = asyncio.Event()

    def take_signals(self) -> None:
        """Have SIGTERM, SIGINT and SIGQUIT end the service, and SIGHUP reload its config."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)

    async def stopped(self) -> None:
        """Wait until the turns end."""
        await self._stop.wait()

    def stop(self) -> None:
        """End the turns."""
        self._stop.set()

    def reload(self) -> None:
        """Have the config read again."""
        self._reload.set()

    async def next_signal(self) -> bool:
        """Return at the next reload, then True, or at the end of the service, then False."""
        stop = asyncio.ensure_future(self._stop.wait())
        reload = asyncio.ensure_future(self._reload.wait())
        try:
            await asyncio.wait({stop, reload}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(stop, reload)
        self._reload.clear()
        return not self._stop.is_set()

    async def of(
        self,
        observed: Observed,
        remaining: Callable[[], float | None],
        helper: Callable[[], asyncio.Future[Any] | None] = lambda: None,
    ) -> AsyncGenerator[Turn]:
        """Yield the turns of a service.

        *remaining* returns the seconds until the next turn without another cause, *helper* a task
        that the service depends on, None while there is none; its error is raised here.
        """
        updates = observed.updates()
        stop = asyncio.ensure_future(self._stop.wait())
        coming: asyncio.Future[Update] = asyncio.ensure_future(anext(updates))
        reload = asyncio.ensure_future(self._reload.wait())
        try:
            while not stop.done():
                waiting: set[asyncio.Future[Any]] = {stop, reload, coming}
                task = helper()
                if task is not None:
                    waiting.add(task)
                await asyncio.wait(
                    waiting, timeout=remaining(), return_when=asyncio.FIRST_COMPLETED
                )
                if task is not None and task.done():
                    task.result()
                if stop.done():
                    return
                update = replace(observed.current, events=())
                if coming.done():
                    update = coming.result()
                    coming = asyncio.ensure_future(anext(updates))
                is_reload = reload.done()
                if is_reload:
                    self._reload.clear()
                    reload = asyncio.ensure_future(self._reload.wait())
                yield Turn(update, is_reload)
        finally:
            await _cancel(stop, reload, coming)
            close = getattr(updates, "aclose", None)
            if close is not None:
                await close()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
