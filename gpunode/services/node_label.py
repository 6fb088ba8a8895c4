# SPDX-License-Identifier: Apache-2.0
"""Follow the label of the node that names its config."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from gpunode.services.healthz import Report
from gpunode.services.turns import Turns


class NodeLabel:
    """The service: *send* is called with each value that *values* yields."""

    def __init__(
        self,
        values: Callable[[], AsyncIterator[str | None]],
        send: Callable[[str | None], None],
    ) -> None:
        self.values = values
        self.send = send
        self.turns = Turns()
        self._value: str | None = None
        self._is_read = False

    async def serve(self) -> None:
        """Follow the label until `turns` ends; raise ApiServerError."""
        stop = asyncio.ensure_future(self.turns.stopped())
        following = asyncio.ensure_future(self._follow())
        try:
            await asyncio.wait((stop, following), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            stop.cancel()
            following.cancel()
            await asyncio.gather(stop, following, return_exceptions=True)

    async def _follow(self) -> None:
        async for value in self.values():
            self._value, self._is_read = value, True
            self.send(value)

    def report(self) -> Report:
        """Return the state of the service for probes."""
        if not self._is_read:
            return Report(("the label of the node has not been read yet",))
        return Report((), {"label": self._value})
