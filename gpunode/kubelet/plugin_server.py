# SPDX-License-Identifier: Apache-2.0
"""Serve a Backend as a device plugin of the kubelet, on a unix socket."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpclib import Status

import gpunode.kubelet.proto.device_plugin_pb2 as messages
from gpunode.kubelet import rpc, sockets
from gpunode.kubelet.backend import AllocationError, Backend, ContainerResponse, Unit
from gpuruntime.errors import bug, escape

log = logging.getLogger(__name__)

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
SOCKET_MODE = 0o600
# How long calls of the kubelet may go on after their server has a successor, seconds.
GRACE = 2.0

_counter = itertools.count()


def endpoint(resource_name: str) -> str:
    """Return the name of the socket of *resource_name*: `nvidia-gpu.sock`."""
    return f"nvidia-{resource_name.rpartition('/')[2]}.sock"


def options(backend: Backend) -> messages.DevicePluginOptions:
    """Return the options of *backend* in the protocol."""
    return messages.DevicePluginOptions(
        pre_start_required=False,
        get_preferred_allocation_available=backend.has_preferred_allocation,
    )


def device(unit: Unit) -> messages.Device:
    """Return *unit* in the protocol; a unit on no NUMA node has no topology."""
    nodes = [messages.NUMANode(ID=node) for node in unit.numa_nodes if node >= 0]
    return messages.Device(
        ID=unit.id,
        health=HEALTHY if unit.healthy else UNHEALTHY,
        topology=messages.TopologyInfo(nodes=nodes) if nodes else None,
    )


def container_response(response: ContainerResponse) -> messages.ContainerAllocateResponse:
    """Return *response* in the protocol."""
    return messages.ContainerAllocateResponse(
        envs=response.envs,
        mounts=[
            messages.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only=mount.read_only,
            )
            for mount in response.mounts
        ],
        devices=[
            messages.DeviceSpec(
                container_path=spec.container_path,
                host_path=spec.host_path,
                permissions=spec.permissions,
            )
            for spec in response.devices
        ],
        annotations=response.annotations,
        cdi_devices=[messages.CDIDevice(name=name) for name in response.cdi_devices],
    )


class Service:
    """The methods of v1beta1.DevicePlugin for one Backend."""

    def __init__(self, backend: Backend, streams_changed: Callable[[], None]) -> None:
        """Serve *backend*; call *streams_changed* when a stream of unit lists begins or ends."""
        self.backend = backend
        self.streams_changed = streams_changed
        self.open_streams = 0
        self.streams = 0  # since the start

    def server(self) -> rpc.Server:
        """Return a server of the methods."""
        return rpc.Server(
            messages.DESCRIPTOR.services_by_name["DevicePlugin"],
            {
                "GetDevicePluginOptions": self.get_options,
                "ListAndWatch": self.list_and_watch,
                "GetPreferredAllocation": self.get_preferred_allocation,
                "Allocate": self.allocate,
                "PreStartContainer": self.pre_start_container,
            },
        )

    async def get_options(self, request: Any) -> Any:  # noqa: ANN401
        """Return the options."""
        del request
        return options(self.backend)

    async def list_and_watch(self, request: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        """Yield all units, and all again after each change."""
        del request
        self.open_streams += 1
        self.streams += 1
        self.streams_changed()
        sent = None
        try:
            async with contextlib.aclosing(self.backend.unit_lists()) as lists:  # type: ignore[type-var]
                async for units in lists:
                    response = messages.ListAndWatchResponse(devices=map(device, units))
                    if response != sent:
                        sent = response
                        yield response
        finally:
            self.open_streams -= 1
            self.streams_changed()

    async def get_preferred_allocation(self, request: Any) -> Any:  # noqa: ANN401
        """Return the preferred units of each container."""
        response = messages.PreferredAllocationResponse()
        for wish in request.container_requests:
            ids = self._answer(
                self._preferred,
                list(wish.available_deviceIDs),
                list(wish.must_include_deviceIDs),
                wish.allocation_size,
            )
            response.container_responses.add(deviceIDs=ids)
        return response

    def _preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        missing = sorted(set(must_include) - set(available))
        if missing:
            raise AllocationError(
                f'the units that must be included have "{missing[0]}", which is not available'
            )
        if not len(set(must_include)) <= size <= len(set(available)):
            raise AllocationError(
                f"{size} units are requested, of which {len(must_include)} must be included and "
                f"{len(available)} are available"
            )
        return list(self.backend.preferred(available, must_include, size))

    async def allocate(self, request: Any) -> Any:  # noqa: ANN401
        """Return what each container gets: for all of them, or an error."""
        response = messages.AllocateResponse()
        for container in request.container_requests:
            ids = list(container.devices_ids)
            allocated = self._answer(self.backend.allocate, ids)
            response.container_responses.append(container_response(allocated))
        return response

    async def pre_start_container(self, request: Any) -> Any:  # noqa: ANN401
        """Return nothing: the options say that no call is needed."""
        del request
        return messages.PreStartContainerResponse()

    def _answer(self, method: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """Return what *method* of the backend returns; an error ends the call with its text."""
        name = self.backend.resource_name
        try:
            return method(*arguments)
        except AllocationError as error:
            text = escape(str(error))
            log.warning("%s: a request of the kubelet is refused: %s", name, text)
            raise rpc.RpcError(Status.INVALID_ARGUMENT, text) from error
        except Exception as error:
            text = bug(error).lines()
            log.error("%s: %s", name, text)
            raise rpc.RpcError(Status.INTERNAL, text) from error


class PluginServer:
    """A server of one Backend on a socket of its own in *directory*.

    The socket is bound to a temporary name and then renamed: it takes the place of the socket of
    a process that was killed, and is never there without its server.
    """

    def __init__(
        self, backend: Backend, directory: str, streams_changed: Callable[[], None]
    ) -> None:
        self.path = os.path.join(directory, endpoint(backend.resource_name))
        self.service = Service(backend, streams_changed)
        self._directory = directory
        self._server: rpc.Server | None = None
        self._socket: sockets.PinnedSocket | None = None

    async def start(self) -> None:
        """Bind the socket and serve; raise KubeletError if that is not possible."""
        sockets.check_path(self.path)
        sockets.check_directory(self._directory)
        temporary = os.path.join(self._directory, f".{os.getpid():x}-{next(_counter):x}")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # The mode of a socket's descriptor is that of the file which `bind` makes.
            os.fchmod(listener.fileno(), SOCKET_MODE)
            listener.bind(temporary)
            self._socket = sockets.PinnedSocket(temporary)
            self._server = self.service.server()
            await self._server.serve(listener)
            os.rename(temporary, self.path)
        except OSError as error:
            listener.close()
            await self.stop()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise sockets.KubeletError(
                f'cannot make the socket "{self.path}": {error.strerror}',
                "check that the file system of the directory allows sockets, and that no other "
                "program changes it",
            ) from error

    def is_in_place(self) -> bool:
        """Return whether the path names the socket of this server."""
        return self._socket is not None and self._socket.is_at(self.path)

    def is_replaced(self) -> bool:
        """Return whether the path names a socket that another process serves."""
        return not self.is_in_place() and sockets.is_served(self.path)

    async def stop(self, grace: float = 0.0) -> None:
        """Remove the socket if it is still ours, and end the server after *grace* seconds."""
        if self._socket is not None:
            if self._socket.is_at(self.path):
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            self._socket.close()
            self._socket = None
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
