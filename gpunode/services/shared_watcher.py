# SPDX-License-Identifier: Apache-2.0
"""One watcher for several services, in this process and in a child without rights.

The child gets the updates and measurements of the watcher over a socket, from a process that it
trusts. It answers with single bytes, which is all that the parent reads of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from gpunode.model import DriverState, DriverStatus, Telemetry, Update
from gpunode.watch import framing, wire
from gpunode.watch.watcher import Watcher

READY, NOT_READY = b"r", b"n"


class SharedWatcher:
    """The running *watcher* as a context: the end of the context does not end the watcher."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    async def __aenter__(self) -> Watcher:
        return self.watcher

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the watcher to the other services."""


class Relay:
    """Send what *watcher* reports to the process at the other end of *connection*.

    *is_ready* is the state that the other end has reported last, None before its first report.
    """

    def __init__(self, watcher: Watcher, connection: socket.socket) -> None:
        self.watcher = watcher
        self.connection = connection
        self.is_ready: bool | None = None

    async def serve(self) -> None:
        """Send until the other end closes the connection."""
        reader, writer = await asyncio.open_connection(sock=self.connection)
        updates = asyncio.create_task(self._send_updates(writer))
        try:
            while requests := await reader.read(64):
                self.is_ready = requests.endswith(READY)
                telemetry = self.watcher.request_telemetry()
                if telemetry is not None:
                    writer.write(framing.encode({"telemetry": wire.plain(telemetry)}))
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            updates.cancel()
            await asyncio.gather(updates, return_exceptions=True)
            writer.close()

    async def _send_updates(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            async for update in self.watcher.updates():
                writer.write(framing.encode({"update": wire.plain(update)}))
                await writer.drain()


class RelayedWatcher:
    """The watcher of the process at the other end of *connection*, while entered as a context.

    *is_ready* returns the state that the other end is told of with each request.
    """

    def __init__(self, connection: socket.socket, is_ready: Callable[[], bool]) -> None:
        self._connection = connection
        self._is_ready = is_ready
        self._current = Update(DriverStatus(DriverState.STARTING, 0.0), None)
        self._telemetry: Telemetry | None = None
        self._received_at = 0.0
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self._reading = asyncio.create_task(self._read(reader))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._reading is not None
        assert self._writer is not None
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()

    @property
    def current(self) -> Update:
        """The last update, without events."""
        return Update(self._current.status, self._current.model)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the current state, then each update; for one consumer."""
        yield self.current
        while True:
            yield await self._updates.get()

    def request_telemetry(self) -> Telemetry | None:
        """Return the last measurements, None before the first; have them made from now on."""
        assert self._writer is not None
        self._writer.write(READY if self._is_ready() else NOT_READY)
        if self._telemetry is None:
            return None
        age_s = self._telemetry.age_s + asyncio.get_running_loop().time() - self._received_at
        return Telemetry(age_s, self._telemetry.devices)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = framing.Decoder()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for message in decoder.feed(data):
                    self._take(wire.reported(message))

    def _take(self, value: Update | Telemetry) -> None:
        if isinstance(value, Update):
            self._current = value
            self._updates.put_nowait(value)
        else:
            self._telemetry = value
            self._received_at = asyncio.get_running_loop().time()
