# SPDX-License-Identifier: Apache-2.0
"""A kubelet's device manager over real sockets, with faults on a script."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from node import peer

import gpunode.kubelet.proto.device_plugin_pb2 as messages

SOCKET = "kubelet.sock"
CHECKPOINT = "kubelet_internal_checkpoint"
# What a Register can do: answer and connect; refuse; never answer; answer and never connect;
# answer, connect, and end the stream after the first list.
OK, REFUSE, SILENT, NO_DIAL, END_STREAM = "ok", "refuse", "silent", "no-dial", "end-stream"


@dataclass(eq=False)
class Connection:
    """The kubelet's connection to a plugin."""

    request: messages.RegisterRequest
    options: messages.DevicePluginOptions | None = None
    lists: list[dict[str, str]] = field(default_factory=list)  # of each list: id → health
    devices: list[Any] = field(default_factory=list)  # of the last list
    is_ended: bool = False
    channel: Any = None
    task: asyncio.Task[None] | None = None

    async def call(self, name: str, request: Any) -> Any:
        """Call the method *name* of the plugin."""
        service = messages.DESCRIPTOR.services_by_name["DevicePlugin"]
        return await peer.call(self.channel, service.methods_by_name[name])(request, timeout=5)

    async def allocate(self, *containers: list[str]) -> Any:
        """Return the answer of Allocate for the units of each container."""
        request = messages.AllocateRequest()
        for ids in containers:
            request.container_requests.add(devices_ids=ids)
        return await self.call("Allocate", request)


class FakeKubelet:
    """A kubelet in *directory*; *script* has what each Register does, the last one for ever."""

    def __init__(self, directory: Path, *script: str) -> None:
        self.directory = directory
        self.script: Iterator[str] = itertools.chain(script, itertools.repeat(OK))
        self.socket = directory / SOCKET
        self.generation = 0
        # Of each Register: the number of the kubelet's socket, the name of the resource.
        self.registrations: list[tuple[int, str]] = []
        self.connections: list[Connection] = []
        self._server: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Remove every file but the checkpoint, as the kubelet does, and serve."""
        for path in self.directory.iterdir():
            if path.name != CHECKPOINT:
                path.unlink()
        await self.serve()

    async def serve(self) -> None:
        """Serve at a new socket."""
        self.generation += 1
        generation = self.generation

        async def register(request: Any, context: Any) -> Any:
            self.registrations.append((generation, request.resource_name))
            action = next(self.script)
            if action == REFUSE:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the version is refused")
            if action == SILENT:
                await asyncio.sleep(3600)
            if action != NO_DIAL:
                self._spawn(self._use(request, action))
            return messages.Empty()

        self._server = grpc.aio.server()
        service = messages.DESCRIPTOR.services_by_name["Registration"]
        self._server.add_generic_rpc_handlers((peer.handler(service, {"Register": register}),))
        # gRPC unlinks the path when a server stops: the path of another one by then.
        hidden = self.directory / f".k{generation}"
        self._server.add_insecure_port(peer.address(str(hidden)))
        await self._server.start()
        os.rename(hidden, self.socket)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _use(self, request: messages.RegisterRequest, action: str) -> None:
        """Connect to the plugin, and read its lists until the stream ends."""
        target = peer.address(str(self.directory / request.endpoint))
        connection = Connection(request, task=asyncio.current_task())
        for other in self.connections:
            # The kubelet ends the old connection of a resource that is registered again.
            if other.request.resource_name == request.resource_name and other.task is not None:
                other.task.cancel()
        service = messages.DESCRIPTOR.services_by_name["DevicePlugin"]
        try:
            async with grpc.aio.insecure_channel(target, peer.CHANNEL_OPTIONS) as channel:
                connection.channel = channel
                connection.options = await connection.call(
                    "GetDevicePluginOptions", messages.Empty()
                )
                self.connections.append(connection)
                watch = peer.call(channel, service.methods_by_name["ListAndWatch"])
                async for answer in watch(messages.Empty()):
                    connection.devices = list(answer.devices)
                    connection.lists.append({item.ID: item.health for item in answer.devices})
                    if action == END_STREAM:
                        break
        except grpc.aio.AioRpcError:
            pass  # the plugin has ended
        finally:
            connection.is_ended = True

    async def stop(self) -> None:
        """End as a killed kubelet does: connections break, the socket stays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self) -> None:
        """End, and start again."""
        await self.stop()
        await self.start()

    def live(self) -> list[str]:
        """Return the resources with an open stream that has sent a list."""
        return sorted(
            connection.request.resource_name
            for connection in self.connections
            if connection.lists and not connection.is_ended
        )


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Return when *condition* is true; fail after *seconds*."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not become true"
        await asyncio.sleep(0.005)
