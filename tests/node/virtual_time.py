# SPDX-License-Identifier: Apache-2.0
"""An event loop whose time passes when everything waits: an hour takes as long as its work."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Adds what `select` would wait to *now*, instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is not None and timeout > 0:
            self.now += timeout
        return events


class _Inline(ThreadPoolExecutor):
    """Calls at once what would be called in a thread, since threads know nothing of this time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (as an executor does)
            future.set_exception(error)
        return future


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; `time` begins at 0."""

    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)
        self.set_default_executor(_Inline(1))

    def time(self) -> float:
        """Return the seconds since the loop was made."""
        return self.virtual.now


def run(work: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run *work*, to which the loop is passed."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        runner.run(work(loop))
