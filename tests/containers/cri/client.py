# SPDX-License-Identifier: Apache-2.0
"""The calls of the Container Runtime Interface (version 1) that a kubelet makes for a pod.

Field numbers are those of the interface; other fields have their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from . import wire

# A value of NamespaceMode, and one of ContainerState.
OF_THE_NODE = 2
EXITED = 2
TIMEOUT_S = 30
Message = dict[int, Any]


@dataclass(frozen=True)
class Pod:
    """A pod in the network of the node, below the cgroup *parent*; *logs* is a directory."""

    name: str
    uid: str
    parent: str
    logs: str

    def message(self) -> Message:
        """Return the pod as a PodSandboxConfig."""
        return {
            1: {1: self.name, 2: self.uid, 3: "default"},
            3: self.logs,
            8: {1: self.parent, 2: {1: {1: OF_THE_NODE}}},
        }


@dataclass(frozen=True)
class Container:
    """A container of a pod; its log file has the same name."""

    name: str
    image: str
    command: Sequence[str]
    environment: Sequence[str] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> Message:
        """Return the container as a ContainerConfig."""
        pairs = (entry.split("=", 1) for entry in self.environment)
        return {
            1: {1: self.name},
            2: {1: self.image},
            3: list(self.command),
            6: [{1: name, 2: value} for name, value in pairs],
            10: wire.entries(self.annotations),
            11: self.name,
            15: {2: {3: {1: OF_THE_NODE}}},
        }


class Client:
    """A connection to the socket of an engine. Calls raise grpc.RpcError."""

    def __init__(self, socket: str, timeout_s: int = TIMEOUT_S) -> None:
        self.channel = grpc.insecure_channel(f"unix://{socket}")
        self.timeout_s = timeout_s

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def has_image(self, name: str) -> bool:
        """Return whether the engine has the image *name*."""
        return 1 in self._call("ImageService/ImageStatus", {1: {1: name}})

    def run_sandbox(self, pod: Pod, handler: str) -> str:
        """Start the sandbox of *pod* with the runtime *handler*, and return its id."""
        return self._text("RunPodSandbox", {1: pod.message(), 2: handler})

    def create(self, sandbox: str, pod: Pod, container: Container) -> str:
        """Create *container* in the *sandbox* of *pod*, and return its id."""
        request = {1: sandbox, 2: container.message(), 3: pod.message()}
        return self._text("CreateContainer", request)

    def start(self, container: str) -> None:
        """Start *container*."""
        self._runtime("StartContainer", {1: container})

    def has_exited(self, container: str) -> bool:
        """Return whether *container* has exited."""
        status = wire.decode(self._runtime("ContainerStatus", {1: container})[1][0])
        return status.get(3) == [EXITED]

    def execute(self, container: str, command: Sequence[str]) -> tuple[int, str, str]:
        """Run *command* in *container*; return status, output and error output."""
        response = self._runtime("ExecSync", {1: container, 2: list(command), 3: self.timeout_s})
        output, errors = (response.get(number, [b""])[0].decode() for number in (1, 2))
        return response.get(3, [0])[0], output, errors

    def limit(self, container: str, shares: int) -> None:
        """Set the CPU shares of *container*, as a kubelet does for a running container."""
        self._runtime("UpdateContainerResources", {1: container, 2: {3: shares}})

    def remove(self, container: str) -> None:
        """Stop *container* at once and remove it."""
        self._runtime("StopContainer", {1: container})
        self._runtime("RemoveContainer", {1: container})

    def remove_sandbox(self, sandbox: str) -> None:
        """Stop *sandbox* with its containers, and remove it."""
        self._runtime("StopPodSandbox", {1: sandbox})
        self._runtime("RemovePodSandbox", {1: sandbox})

    def _text(self, name: str, request: Message) -> str:
        text: bytes = self._runtime(name, request)[1][0]
        return text.decode()

    def _runtime(self, name: str, request: Message) -> dict[int, list[Any]]:
        return self._call(f"RuntimeService/{name}", request)

    def _call(self, name: str, request: Message) -> dict[int, list[Any]]:
        method = self.channel.unary_unary(
            f"/runtime.v1.{name}",
            request_serializer=wire.encode,
            response_deserializer=wire.decode,
        )
        response: dict[int, list[Any]] = method(request, timeout=self.timeout_s)
        return response
