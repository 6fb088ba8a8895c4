# SPDX-License-Identifier: Apache-2.0
"""The connection between the agent and its child without rights: JSON in frames, both ways.

The child gets what the watcher reports. It sends requests, which the agent checks strictly: the
child is the process that parses what others send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from gpunode.model import DriverState, DriverStatus, Telemetry, Update
from gpunode.services.observation import Measuring
from gpunode.watch import framing, wire
from gpunode.watch.framing import FrameError
from gpunode.watch.streams import Streams

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_MAX_REQUEST_BYTES = 4096
_REPORT_DEADLINE_S = 4.0
TELEMETRY, REPORT = "telemetry", "report"


async def messages(
    reader: asyncio.StreamReader, max_bytes: int = framing.MAX_BYTES
) -> AsyncIterator[Any]:
    """Yield the messages, of at most *max_bytes* each, until the other end closes the connection.

    Raises FrameError.
    """
    decoder = framing.Decoder(max_bytes)
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_READ_BYTES):
            for message in decoder.feed(data):
                yield message


class ServerEnd:
    """The agent's end: sends what *watcher* reports to the child at *connection*.

    *report* returns the state of the agent, as JSON; *on_label* is called with the value of the
    node's label that the child has read, None if the node does not have it. *config* returns the
    path of the config file in force, "" while none is chosen.
    """

    def __init__(
        self,
        watcher: Measuring,
        connection: socket.socket,
        report: Callable[[], dict[str, Any]],
        on_label: Callable[[str | None], None],
        config: Callable[[], str],
    ) -> None:
        self.config = config
        self.watcher = watcher
        self.report = report
        self.on_label = on_label
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self) -> None:
        """Send and answer until the child closes the connection, or sends what is no request."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        if path := self.config():
            self.send({"config": path})
        updates = asyncio.create_task(self._send_updates(self._writer))
        try:
            async for message in messages(reader, _MAX_REQUEST_BYTES):
                self._take(message)
                with contextlib.suppress(ConnectionError):
                    await self._writer.drain()
        except FrameError as error:
            log.error("the process without rights has sent what is not a request: %s", error)
        finally:
            updates.cancel()
            await asyncio.gather(updates, return_exceptions=True)
            self._writer.close()
            self._writer = None

    def send(self, message: dict[str, Any]) -> None:
        """Send *message* if the child runs."""
        if self._writer is not None:
            self._writer.write(framing.encode(message))

    def _take(self, message: object) -> None:
        if message == {"request": TELEMETRY}:
            telemetry = self.watcher.request_telemetry()
            if telemetry is not None:
                self.send({"telemetry": wire.plain(telemetry)})
        elif message == {"request": REPORT}:
            self.send({"report": self.report()})
        elif isinstance(message, dict) and list(message) == ["label"]:
            value = message["label"]
            if value is not None and not isinstance(value, str):
                raise FrameError("a label that is not a string")
            self.on_label(value)
        else:
            raise FrameError("an unknown request")

    async def _send_updates(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            async for update in self.watcher.updates():
                writer.write(framing.encode({"update": wire.plain(update)}))
                await writer.drain()


class ClientEnd:
    """The child's end, a watcher for the services of the child.

    *on_config* is called with the path of the config file in force when it is chosen or changed,
    and when it has to be read again.
    """

    def __init__(self, connection: socket.socket, on_config: Callable[[str], None]) -> None:
        self.on_config = on_config
        self._connection = connection
        self._current = Update(DriverStatus(DriverState.STARTING, 0.0), None)
        self._telemetry: Telemetry | None = None
        self._received_at = 0.0
        self._streams = Streams(lambda: self.current)
        self._reports: list[asyncio.Future[dict[str, Any]]] = []
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self) -> None:
        """Receive until the agent ends."""
        reader, self._writer = await asyncio.open_connection(sock=self._connection)
        try:
            async for message in messages(reader):
                self._take(message)
        finally:
            self._writer.close()
            self._writer = None

    @property
    def current(self) -> Update:
        """The last update, without events."""
        return Update(self._current.status, self._current.model)

    def updates(self) -> AsyncIterator[Update]:
        """Yield the current state, then an update after each change.

        A consumer that is slow gets the newest state, with all events since its last update.
        """
        return self._streams.updates()

    def request_telemetry(self) -> Telemetry | None:
        """Return the last measurements, None before the first; have them made from now on."""
        self._send({"request": TELEMETRY})
        if self._telemetry is None:
            return None
        age_s = self._telemetry.age_s + asyncio.get_running_loop().time() - self._received_at
        return Telemetry(age_s, self._telemetry.devices)

    def send_label(self, value: str | None) -> None:
        """Report the value of the node's label to the agent."""
        self._send({"label": value})

    async def report(self) -> dict[str, Any]:
        """Return the state of the agent; raise TimeoutError if the agent does not answer."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reports.append(future)
        self._send({"request": REPORT})
        async with asyncio.timeout(_REPORT_DEADLINE_S):
            return await future

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(framing.encode(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "report" in message:
            futures, self._reports = self._reports, []
            for future in futures:
                if not future.done():
                    future.set_result(message["report"])
        elif "config" in message:
            self.on_config(message["config"])
        else:
            self._note(wire.reported(message))

    def _note(self, value: Update | Telemetry) -> None:
        if isinstance(value, Update):
            self._current = value
            self._streams.publish(value.events)
        else:
            self._telemetry = value
            self._received_at = asyncio.get_running_loop().time()
