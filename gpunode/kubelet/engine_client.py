# SPDX-License-Identifier: Apache-2.0
"""Ask the engine of this node, over its CRI socket, what it is and how it is configured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import gpunode.kubelet.proto.cri_pb2 as messages
from gpunode.engine import Engine, engine_of
from gpunode.kubelet import rpc
from gpuruntime.errors import GpuRuntimeError, escape

# The sockets of containerd, CRI-O, cri-dockerd, k3s and k0s.
SOCKETS = (
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/cri-dockerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
)
_DEADLINE_S = 2.0
_SERVICE = messages.DESCRIPTOR.services_by_name["RuntimeService"]


class EngineError(GpuRuntimeError):
    """The engine does not answer."""

    phase = "engine"


def sockets_of(candidates: Iterable[str] = SOCKETS) -> list[str]:
    """Return those of *candidates* that exist."""
    return [path for path in candidates if os.path.exists(path)]


async def ask(paths: Sequence[str]) -> Engine:
    """Return the engine behind the first socket of *paths* that answers.

    The socket of a containerd that serves docker does not. Raises EngineError if none does.
    """
    problem = "no socket of an engine exists"
    for path in paths:
        try:
            return await _ask(path)
        except rpc.RpcError as error:
            problem = f'the engine at "{path}" does not answer: {escape(str(error))}'
    raise EngineError(problem, "name the socket of the engine: --cri-socket")


async def _ask(path: str) -> Engine:
    version = await _call(path, "Version", messages.VersionRequest())
    status = await _call(path, "Status", messages.StatusRequest(verbose=True))
    return engine_of(version.runtime_name, version.runtime_version, _config(status.info))


async def _call(path: str, name: str, request: Any) -> Any:  # noqa: ANN401 (messages)
    return await rpc.call(path, _SERVICE.methods_by_name[name], request, _DEADLINE_S)


def _config(info: Any) -> dict[str, Any]:  # noqa: ANN401 (a map of protobuf)
    """Return the engine's config in the verbose status, {} if it has none."""
    try:
        config = json.loads(info.get("config", "{}"))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
