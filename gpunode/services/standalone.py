# SPDX-License-Identifier: Apache-2.0
"""Run one service as a program of its own."""

from __future__ import annotations

import contextlib

from gpunode.services.healthz import probe_server
from gpunode.services.service_group import Service


async def run(service: Service, healthz: str = "") -> None:
    """Serve until a signal ends *service*, with probes at the address *healthz*, "" for none.

    Raises ArgumentError or HttpError if the address cannot be used, and the errors of the service.
    """
    probes = probe_server(healthz, service.report) if healthz else contextlib.nullcontext()
    async with probes:
        service.turns.take_signals()
        await service.serve()
