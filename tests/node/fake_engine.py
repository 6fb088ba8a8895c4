# SPDX-License-Identifier: Apache-2.0
"""An engine that says over CRI what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio
from node import peer

import gpunode.kubelet.proto.cri_pb2 as messages


async def serve_engine(socket: Path, version: str, **config: Any) -> Any:
    """Return a running server of the containerd *version* with *config*."""
    return await serve_engine_text(socket, version, json.dumps(config))


async def serve_engine_text(socket: Path, version: str, config: str) -> Any:
    """Return a running server of the containerd *version* that reports the text *config*."""

    async def answer_version(request: Any, context: Any) -> Any:
        return messages.VersionResponse(runtime_name="containerd", runtime_version=version)

    async def answer_status(request: Any, context: Any) -> Any:
        assert request.verbose
        return messages.StatusResponse(info={"config": config})

    server = grpc.aio.server()
    service = messages.DESCRIPTOR.services_by_name["RuntimeService"]
    methods = {"Version": answer_version, "Status": answer_status}
    server.add_generic_rpc_handlers((peer.handler(service, methods),))
    server.add_insecure_port(peer.address(str(socket)))
    await server.start()
    return server
