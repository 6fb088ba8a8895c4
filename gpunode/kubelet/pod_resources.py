# SPDX-License-Identifier: Apache-2.0
"""The kubelet's list of pod resources: asked by root, read by a process without privileges.

The socket belongs to root. `forward` runs in a root process that does nothing but ask the kubelet
and hand on the bytes of its answer; `PodResources` is the other end, which reads them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

from gpunode.pod_devices import Claim, Container
from gpuruntime.errors import GpuRuntimeError, escape

SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
MAX_BYTES = 64 << 20
_METHOD = "/v1.PodResourcesLister/List"
_DEADLINE_S = 5.0
_LIST, _ERROR = 1, 2
# Of one answer: its kind, and the length of the list or of the error's text.
_HEADER = struct.Struct("!BI")
_REQUEST = b"L"


class PodResourcesError(GpuRuntimeError):
    """The kubelet does not say which pods have which devices."""

    phase = "pod-resources"


def forward(connection: socket.socket, path: str) -> None:
    """Answer each request on *connection* with the kubelet's list; return when it is closed.

    The answer of the kubelet at the socket *path* is not read here.
    """
    while connection.recv(1) == _REQUEST:
        connection.sendall(asyncio.run(_answer(path)))


async def forward_on_loop(connection: socket.socket, path: str) -> None:
    """Do the same as `forward` on the event loop of a service."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)  # noqa: FBT003 (its name says it)
    while await loop.sock_recv(connection, 1) == _REQUEST:
        await loop.sock_sendall(connection, await _answer(path))


async def _answer(path: str) -> bytes:
    """Return the answer to one request: the kubelet's list, or its error."""
    # The service, which is another process, does not import it.
    from gpunode.kubelet import rpc  # noqa: PLC0415

    try:
        data = await rpc.call_bytes(path, _METHOD, b"", _DEADLINE_S)
        kind = _LIST
    except rpc.RpcError as error:
        kind, data = _ERROR, escape(str(error)).encode()[:1024]
    return _HEADER.pack(kind, len(data)) + data


class PodResources:
    """The end of the connection that reads the lists."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)  # noqa: FBT003 (its name says it)
        self._connection = connection
        self._lock = asyncio.Lock()

    async def containers(self) -> tuple[Container, ...]:
        """Return the containers with devices; raise PodResourcesError.

        It takes at most the deadline of the kubelet's answer and a little more.
        """
        loop = asyncio.get_running_loop()
        async with self._lock:
            try:
                async with asyncio.timeout(_DEADLINE_S + 1):
                    await loop.sock_sendall(self._connection, _REQUEST)
                    kind, length = _HEADER.unpack(await self._receive(_HEADER.size))
                    data = await self._receive(min(length, MAX_BYTES))
            except (OSError, TimeoutError, EOFError) as error:
                raise PodResourcesError(
                    f"the process that asks the kubelet does not answer: {type(error).__name__}",
                    "restart this service",
                ) from error
        if kind != _LIST:
            raise PodResourcesError(
                f"cannot list the pods' devices: {data.decode('utf-8', 'replace')}",
                "check --pod-resources-socket, and that the kubelet runs",
            )
        return tuple(_containers(data))

    async def _receive(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < size:
            part = await loop.sock_recv(self._connection, min(size - len(data), 1 << 16))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def _containers(data: bytes) -> Iterator[Container]:
    """Yield the containers of a list; raise PodResourcesError if it is not one."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 (after the fork)

    from gpunode.kubelet.proto import pod_resources_pb2 as messages  # noqa: PLC0415

    try:
        answer = messages.ListPodResourcesResponse.FromString(data)
    except DecodeError as error:
        raise PodResourcesError(
            "the kubelet's list of the pods' devices cannot be read",
            "check that --pod-resources-socket is the kubelet's",
        ) from error
    for pod in answer.pod_resources:
        for container in pod.containers:
            devices = tuple(
                (one.resource_name, tuple(one.device_ids)) for one in container.devices
            )
            claims = tuple(
                Claim(
                    claim.claim_name,
                    claim.claim_namespace,
                    one.driver_name,
                    one.pool_name,
                    one.device_name,
                )
                for claim in container.dynamic_resources
                for one in claim.claim_resources
            )
            if devices or claims:
                yield Container(pod.namespace, pod.name, container.name, devices, claims)
