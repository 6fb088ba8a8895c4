# SPDX-License-Identifier: Apache-2.0
"""The agent's end of the connection to its child: what it accepts, and what it refuses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpunode.model import DriverState, DriverStatus, Telemetry, Update
from gpunode.services.relay import ClientEnd, ServerEnd
from gpunode.watch import framing

UPDATE = Update(DriverStatus(DriverState.ABSENT, 1.0, "no driver"), None)


class FixedWatcher:
    """A watcher with one update and one measurement."""

    current = UPDATE

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the update, and wait."""
        yield UPDATE
        await asyncio.Event().wait()

    def request_telemetry(self) -> Telemetry | None:
        """Return the measurement."""
        return Telemetry(1.0, ())


class Ends:
    """Both ends of a connection, the labels that arrive, and the configs."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        self.labels: list[str | None] = []
        self.configs: list[str] = []
        self.server = ServerEnd(
            FixedWatcher(), own, lambda: {"own": 1}, self.labels.append, lambda: "/c"
        )
        self.other = other
        self.client = ClientEnd(other, self.configs.append)


def test_the_child_gets_updates_configs_and_reports() -> None:
    """And the agent the label of the node."""

    async def scenario() -> None:
        ends = Ends()
        tasks = [asyncio.create_task(end.serve()) for end in (ends.server, ends.client)]
        updates = ends.client.updates()
        while (update := await anext(updates)) != UPDATE:
            assert update.status.state is DriverState.STARTING
        assert await ends.client.report() == {"own": 1}
        ends.client.send_label(None)
        ends.client.send_label("a")
        ends.client.request_telemetry()
        await ends.client.report()
        telemetry = ends.client.request_telemetry()
        assert telemetry is not None
        assert telemetry.age_s >= 1.0
        ends.server.send({"config": "/d"})
        await ends.client.report()
        assert (ends.labels, ends.configs) == ([None, "a"], ["/c", "/d"])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(
    "message",
    [{"label": 7}, {"label": "a", "x": 1}, {"request": "x"}, [], {}, {"config": "/etc/shadow"}],
)
def test_what_is_no_request_ends_the_connection(message: Any) -> None:
    """The child reads what others send: the agent does not guess what it means."""

    async def scenario() -> None:
        ends = Ends()
        ends.other.sendall(framing.encode(message))
        await ends.server.serve()
        assert ends.labels == []
        ends.other.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_request_that_is_too_long_ends_the_connection() -> None:
    """Before its bytes are kept."""

    async def scenario() -> None:
        ends = Ends()
        ends.other.sendall((1 << 20).to_bytes(4, "big"))
        await ends.server.serve()
        ends.other.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))
