# SPDX-License-Identifier: Apache-2.0
"""gRPC over unix sockets on the event loop: servers and calls from a service's descriptor.

By grpclib, which is Python on asyncio. The threads of grpcio's C library wake up several times a
second, more with more processors, while nothing happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpclib import GRPCError, Status
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server as _Server

# It reports each stream that the peer ends, which a kubelet does whenever it restarts.
logging.getLogger("grpclib").setLevel(logging.WARNING)

# Request → answer, or the stream of answers.
Method = Callable[[Any], Awaitable[Any]] | Callable[[Any], AsyncIterator[Any]]


class RpcError(Exception):
    """A call ends with the status *status* and a text for the caller."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


def _unary(method: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[None]]:
    async def serve(stream: Any) -> None:  # noqa: ANN401 (of messages that differ)
        request = await stream.recv_message()
        try:
            await stream.send_message(await method(request))
        except RpcError as error:
            raise GRPCError(error.status, str(error)) from error

    return serve


def _streaming(method: Callable[[Any], AsyncIterator[Any]]) -> Callable[[Any], Awaitable[None]]:
    async def serve(stream: Any) -> None:  # noqa: ANN401 (of messages that differ)
        request = await stream.recv_message()
        # The peer ends a stream at any time: the generator must end with it.
        async with contextlib.aclosing(method(request)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                await stream.send_message(answer)

    return serve


class _Service:
    """A service as grpclib reads it."""

    def __init__(self, service: ServiceDescriptor, methods: Mapping[str, Method]) -> None:
        self._handlers = {
            path(method): Handler(
                _streaming(methods[method.name])  # type: ignore[arg-type]
                if method.server_streaming
                else _unary(methods[method.name]),  # type: ignore[arg-type]
                Cardinality.UNARY_STREAM if method.server_streaming else Cardinality.UNARY_UNARY,
                GetMessageClass(method.input_type),
                GetMessageClass(method.output_type),
            )
            for method in service.methods
        }

    def __mapping__(self) -> Mapping[str, Handler]:
        return self._handlers


class Server(_Server):
    """A server of *service* by *methods*, name → method."""

    def __init__(self, service: ServiceDescriptor, methods: Mapping[str, Method]) -> None:
        super().__init__([_Service(service, methods)])
        self._protocols: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self._protocols = [
            other
            for other in self._protocols
            if not (hasattr(other, "processor") and other.handler.closing)  # type: ignore[attr-defined]
        ]
        self._protocols.append(protocol)
        return protocol

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of the bound socket *listener*."""
        await self.start(sock=listener)

    async def stop(self, grace: float = 0.0) -> None:
        """Accept no more connections; end those that there are after *grace* seconds."""
        if self._server is None:
            return
        self._server.close()
        if grace:
            await asyncio.sleep(grace)
        self.close()
        await asyncio.gather(*(handler.wait_closed() for handler in self._handlers))
        for protocol in self._protocols:
            if hasattr(protocol, "processor"):
                protocol.processor.close("the server has ended")


def path(method: MethodDescriptor) -> str:
    """Return the path of *method* in the protocol."""
    return f"/{method.containing_service.full_name}/{method.name}"


async def call(socket_path: str, method: MethodDescriptor, request: Any, timeout: float) -> Any:  # noqa: ANN401, ASYNC109 (messages; a field of the request)
    """Return the answer of *method* of the server at *socket_path*.

    Raises RpcError with the server's status; UNAVAILABLE if no server answers at the socket, and
    DEADLINE_EXCEEDED after *timeout* seconds.
    """
    types = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    return await _call(Channel(path=socket_path), path(method), types, request, timeout)


async def call_bytes(socket_path: str, method: str, request: bytes, timeout: float) -> bytes:  # noqa: ASYNC109 (a field of the request)
    """Return the encoded answer of the path *method*; neither message is read here.

    Raises RpcError as `call` does.
    """
    channel = Channel(path=socket_path, codec=_Bytes())
    answer: bytes = await _call(channel, method, (bytes, bytes), request, timeout)
    return answer


class _Bytes(CodecBase):
    """The codec of messages that stay encoded."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:  # noqa: ANN401 (bytes)
        """Return *message*, which is encoded."""
        del message_type
        data: bytes = message
        return data

    def decode(self, data: bytes, message_type: Any) -> bytes:  # noqa: ANN401 (bytes)
        """Return *data* as it is."""
        del message_type
        return data


async def _call(
    channel: Channel,
    method: str,
    types: tuple[type, type],
    request: Any,  # noqa: ANN401 (a message)
    timeout: float,  # noqa: ASYNC109 (a field of the request)
) -> Any:  # noqa: ANN401 (a message)
    try:
        async with asyncio.timeout(timeout):
            return await UnaryUnaryMethod(channel, method, *types)(request, timeout=timeout)
    except GRPCError as error:
        raise RpcError(error.status, error.message or error.status.name) from error
    except (OSError, StreamTerminatedError) as error:
        # A TimeoutError is an OSError too.
        is_late = isinstance(error, TimeoutError)
        status = Status.DEADLINE_EXCEEDED if is_late else Status.UNAVAILABLE
        raise RpcError(status, str(error)) from error
    finally:
        channel.close()
