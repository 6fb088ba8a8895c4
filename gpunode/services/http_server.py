# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for probes and metrics: GET and HEAD of a few paths."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Self

from gpuruntime.errors import ArgumentError, GpuRuntimeError

_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]{1,5})\Z"
)
_MAX_REQUEST = 8192
_DEADLINE_S = 5.0
_MAX_CLIENTS = 32


class HttpError(GpuRuntimeError):
    """The address of a server cannot be used."""

    phase = "http"


@dataclass(frozen=True, slots=True)
class Answer:
    """The body for a path, with its type and the status line's code and reason."""

    body: bytes
    content_type: str = "application/json"
    status: str = "200 OK"


Route = Callable[[], Answer | Awaitable[Answer]]


def address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of *text*, `HOST:PORT` or `:PORT`; raise ArgumentError."""
    match = _ADDRESS.match(text)
    if match is None or int(match["port"]) > 0xFFFF:
        raise ArgumentError(
            f'{option} is "{text}", not an address', 'use HOST:PORT, such as "127.0.0.1:8081"'
        )
    return match["six"] or match["host"] or "", int(match["port"])


class HttpServer:
    """A server on the address *text*, which *option* has set.

    *routes* has the function that returns the answer for each path, or a coroutine that does; it
    is called on the event loop.
    """

    def __init__(self, text: str, option: str, routes: Mapping[str, Route]) -> None:
        self.host, self.port = address(text, option)
        self._option = option
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._clients = 0

    async def start(self) -> None:
        """Listen; raise HttpError if the address cannot be used."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self.host or None, self.port, limit=_MAX_REQUEST
            )
        except OSError as error:
            raise HttpError(
                f'cannot listen on "{self.host}:{self.port}": {error.strerror}',
                f"name a free address of this machine: {self._option}",
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Listen no longer."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def __aenter__(self) -> Self:
        """Listen; raise HttpError if the address cannot be used."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Listen no longer."""
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request; a client that is slow or sends too much gets no answer."""
        self._clients += 1
        try:
            with contextlib.suppress(OSError, TimeoutError, ValueError, EOFError):
                if self._clients <= _MAX_CLIENTS:
                    async with asyncio.timeout(_DEADLINE_S):
                        await self._respond(reader, writer)
        except asyncio.LimitOverrunError:
            pass
        finally:
            self._clients -= 1
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        answer = Answer(b"", status="404 Not Found")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            answer = Answer(b"", status="405 Method Not Allowed")
        else:
            route = self._routes.get(words[1].split(b"?")[0].decode("ascii", "replace"))
            if route is not None:
                result = route()
                answer = result if isinstance(result, Answer) else await result
        header = (
            f"HTTP/1.1 {answer.status}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(header.encode() + (b"" if words[0] == b"HEAD" else answer.body))
        await writer.drain()
