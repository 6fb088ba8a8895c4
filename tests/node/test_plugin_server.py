# SPDX-License-Identifier: Apache-2.0
"""What a plugin's server answers, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from node import peer
from node.backends import SetBackend
from node.fake_kubelet import Connection, until

import gpunode.kubelet.proto.device_plugin_pb2 as messages
from gpunode.kubelet.backend import ContainerResponse, DeviceSpec, Mount, Unit
from gpunode.kubelet.plugin_server import PluginServer


@contextlib.asynccontextmanager
async def connected(backend: SetBackend) -> AsyncIterator[Connection]:
    """Yield a connection to the server of *backend*."""
    directory = tempfile.mkdtemp(prefix="k", dir="/tmp")
    server = PluginServer(backend, directory, lambda: None)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(peer.address(server.path)) as channel:
            yield Connection(messages.RegisterRequest(), channel=channel)
    finally:
        await server.stop()
        shutil.rmtree(directory)


def answer(backend: SetBackend, method: str, request: Any) -> Any:
    """Return the answer of *method*."""

    async def call() -> Any:
        async with connected(backend) as connection:
            return await connection.call(method, request)

    return asyncio.run(call())


def refusal(backend: SetBackend, method: str, request: Any) -> tuple[Any, str]:
    """Return code and text of the error of *method*."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        answer(backend, method, request)
    return error.value.code(), error.value.details()


def units(*names: str) -> SetBackend:
    """Return a backend with these units."""
    return SetBackend(dict.fromkeys(names, True))


def test_every_field_of_a_response_arrives() -> None:
    """The protocol has no field that a backend cannot set."""
    backend = units("a", "b")
    backend.responses["a"] = ContainerResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": "a"},
        mounts=(Mount("/in", "/out"), Mount("/in2", "/out2", read_only=False)),
        devices=(DeviceSpec("/dev/nvidia0", "/driver/dev/nvidia0", "rwm"),),
        annotations={"cdi.k8s.io/x": "nvidia.com/gpu=a"},
        cdi_devices=("nvidia.com/gpu=a", "nvidia.com/gpu=b"),
    )
    request = messages.AllocateRequest(container_requests=[{"devices_ids": ["a"]}])
    (container,) = answer(backend, "Allocate", request).container_responses
    assert container == messages.ContainerAllocateResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": "a"},
        mounts=[
            {"container_path": "/in", "host_path": "/out", "read_only": True},
            {"container_path": "/in2", "host_path": "/out2", "read_only": False},
        ],
        devices=[
            {
                "container_path": "/dev/nvidia0",
                "host_path": "/driver/dev/nvidia0",
                "permissions": "rwm",
            }
        ],
        annotations={"cdi.k8s.io/x": "nvidia.com/gpu=a"},
        cdi_devices=[{"name": "nvidia.com/gpu=a"}, {"name": "nvidia.com/gpu=b"}],
    )


def test_each_container_of_a_request_has_its_response() -> None:
    """In the order of the request."""
    request = messages.AllocateRequest(
        container_requests=[{"devices_ids": ["b"]}, {"devices_ids": ["a", "c"]}]
    )
    responses = answer(units("a", "b", "c"), "Allocate", request).container_responses
    assert [response.envs["UNITS"] for response in responses] == ["b", "a,c"]


def test_an_unknown_unit_refuses_the_whole_request() -> None:
    """The text reaches the user in the status of the pod."""
    request = messages.AllocateRequest(
        container_requests=[{"devices_ids": ["a"]}, {"devices_ids": ["GPU-\nx"]}]
    )
    code, text = refusal(units("a"), "Allocate", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == r'example.com/gpu has no unit "GPU-\x0ax"'


def test_a_fault_of_the_backend_is_one_failed_call() -> None:
    """The kubelet gets an answer, and the server goes on."""

    class Faulty(SetBackend):
        def allocate(self, ids: Any) -> ContainerResponse:
            if ids == ["b"]:
                raise KeyError("b")
            return super().allocate(ids)

    async def case() -> None:
        async with connected(Faulty({"a": True, "b": True})) as connection:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await connection.allocate(["b"])
            assert error.value.code() is grpc.StatusCode.INTERNAL
            assert "this is a bug: KeyError" in error.value.details()
            assert (await connection.allocate(["a"])).container_responses

    asyncio.run(case())


@pytest.mark.parametrize("has_preferred", [True, False])
def test_the_options_say_whether_preferred_allocation_is_available(has_preferred: bool) -> None:
    """The kubelet skips the call otherwise."""
    backend = units("a")
    backend.has_preferred_allocation = has_preferred
    assert answer(backend, "GetDevicePluginOptions", messages.Empty()) == (
        messages.DevicePluginOptions(get_preferred_allocation_available=has_preferred)
    )


def preferred(available: list[str], must_include: list[str], size: int) -> Any:
    """Return the request for one container."""
    return messages.PreferredAllocationRequest(
        container_requests=[
            {
                "available_deviceIDs": available,
                "must_include_deviceIDs": must_include,
                "allocation_size": size,
            }
        ]
    )


def test_a_preferred_allocation_is_the_backends() -> None:
    """Of the available units, with those that must be included."""
    request = preferred(["a", "b", "c"], ["c"], 2)
    (response,) = answer(
        units("a", "b", "c"), "GetPreferredAllocation", request
    ).container_responses
    assert list(response.deviceIDs) == ["c", "a"]


@pytest.mark.parametrize(
    ("available", "must_include", "size", "message"),
    [
        (["a"], ["b"], 1, 'have "b", which is not available'),
        (["a", "b"], ["a", "b"], 1, "1 units are requested"),
        (["a"], [], 2, "2 units are requested"),
        (["a"], [], -1, "-1 units are requested"),
    ],
)
def test_a_preference_that_cannot_be_met_is_refused(
    available: list[str], must_include: list[str], size: int, message: str
) -> None:
    """Not answered with other units than the kubelet offers."""
    request = preferred(available, must_include, size)
    code, text = refusal(units("a", "b"), "GetPreferredAllocation", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in text


def test_a_unit_without_numa_node_has_no_topology() -> None:
    """A node of -1 must not be sent: the kubelet takes it for one."""
    backend = units()
    backend.units = [Unit("a", True, (0, 1)), Unit("b", True, (-1,)), Unit("c", False)]

    async def case() -> None:
        async with connected(backend) as connection:
            service = messages.DESCRIPTOR.services_by_name["DevicePlugin"]
            watch = peer.call(connection.channel, service.methods_by_name["ListAndWatch"])
            stream = watch(messages.Empty())
            first = await stream.read()
            assert [[node.ID for node in item.topology.nodes] for item in first.devices] == [
                [0, 1],
                [],
                [],
            ]
            assert [item.HasField("topology") for item in first.devices] == [True, False, False]
            assert [item.health for item in first.devices] == ["Healthy", "Healthy", "Unhealthy"]
            stream.cancel()
            await until(lambda: backend.open_iterators == 0)

    asyncio.run(case())


def test_the_stream_ends_with_the_backend() -> None:
    """A resource that is gone has no more lists."""
    backend = units("a")

    async def case() -> None:
        async with connected(backend) as connection:
            service = messages.DESCRIPTOR.services_by_name["DevicePlugin"]
            watch = peer.call(connection.channel, service.methods_by_name["ListAndWatch"])
            stream = watch(messages.Empty())
            await stream.read()
            await backend.end()
            assert await stream.read() is grpc.aio.EOF

    asyncio.run(case())
