# SPDX-License-Identifier: Apache-2.0
"""The kubelet's side of our servers and calls: gRPC by grpcio, another implementation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

# The C library otherwise writes lines of its own to stderr for each failed connection.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

# Each channel connects by itself: with gRPC's shared connections, the back-off for a socket
# whose server has ended would delay the connection to its successor.
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def address(path: str) -> str:
    """Return gRPC's name of the unix socket *path*."""
    return f"unix:{quote(path)}"


def handler(
    service: ServiceDescriptor, methods: Mapping[str, Callable[..., Any]]
) -> grpc.GenericRpcHandler:
    """Return what a server needs to serve *service* by *methods*: name → coroutine function.

    A method whose answer is a stream is an asynchronous generator function.
    """
    handlers = {}
    for method in service.methods:
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = make(
            methods[method.name],
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def call(channel: grpc.aio.Channel, method: MethodDescriptor) -> Callable[..., Any]:
    """Return the function that calls *method*: request → answer, or the stream of answers."""
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    multi_callable: Callable[..., Any] = make(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    return multi_callable
