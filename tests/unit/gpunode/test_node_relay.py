# SPDX-License-Identifier: Apache-2.0
"""The node of the manager of MIG over the connection of the agent to its child."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from node.fake_node_api import NAMESPACE, NODE, FakeNodeApi

from gpunode.api.client import connect, connect_async
from gpunode.api.errors import CONFLICT, ApiServerError
from gpunode.api.mig_node import MigNode
from gpunode.api.node_watch import label_values
from gpunode.mig.node import CONFIG_LABEL
from gpunode.services.node_relay import NodeServer, RemoteNode
from gpunode.watch import framing

PATIENCE_S = 20
PODS = {"plugin-x": "nvidia-device-plugin-daemonset", "other-x": "other"}


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run *scenario*, which must not hang."""
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


class Ends:
    """Both ends of a connection: the manager's node, and the server that has the real one."""

    def __init__(self, kubeconfig: Path) -> None:
        own, other = socket.socketpair()
        self.node = RemoteNode()
        self.server = NodeServer(
            other,
            lambda: MigNode(connect(str(kubeconfig)), NODE, NAMESPACE),
            lambda: label_values(connect_async(str(kubeconfig)), NODE, CONFIG_LABEL),
        )
        self.serving = asyncio.create_task(self.server.serve())
        self.passing_on = asyncio.create_task(self.node.serve(own))

    async def close(self) -> None:
        """End the child's end, and then the agent's."""
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        await self.passing_on


def test_the_manager_uses_the_node_over_the_child(tmp_path: Path) -> None:
    """All calls, with the status of an error, and changes of the label."""
    api = FakeNodeApi({CONFIG_LABEL: "small"}, PODS)

    async def scenario() -> None:
        ends = Ends(tmp_path / "kubeconfig")
        node = ends.node
        changes = node.values()
        await anext(changes)
        view = await asyncio.to_thread(node.read)
        assert (dict(view.labels), view.version, view.uid) == ({CONFIG_LABEL: "small"}, "1", "u")
        await asyncio.to_thread(node.set_labels, {CONFIG_LABEL: "large"}, view.version)
        await anext(changes)
        assert api.labels == {CONFIG_LABEL: "large"}
        with pytest.raises(ApiServerError, match=f'set labels of the node "{NODE}"') as raised:
            await asyncio.to_thread(node.set_labels, {}, view.version)
        assert raised.value.status == CONFLICT
        assert raised.value.hint
        apps = ["nvidia-device-plugin-daemonset"]
        assert await asyncio.to_thread(node.pods, apps) == ["plugin-x"]
        await asyncio.to_thread(node.delete_pod, "plugin-x")
        assert api.deleted == ["plugin-x"]
        await asyncio.to_thread(node.report, "Reason", "text", "u", is_warning=True)
        assert api.events == [("Reason", "text")]
        await ends.close()

    with api.config(tmp_path / "kubeconfig"):
        run(scenario)


def test_a_label_that_cannot_be_followed_is_an_error(tmp_path: Path) -> None:
    """With the message and the hint of the child."""
    (tmp_path / "kubeconfig").write_text("not: one\n")

    async def scenario() -> None:
        ends = Ends(tmp_path / "kubeconfig")
        for action in (anext(ends.node.values()), asyncio.to_thread(ends.node.read)):
            with pytest.raises(ApiServerError, match="is not a kubeconfig") as raised:
                await action
            assert "--kubeconfig" in (raised.value.hint or "")
        await ends.close()

    run(scenario)


def test_a_child_that_starts_later_answers() -> None:
    """One that ends is an error at once, one that does not come after a time."""

    async def scenario() -> None:
        node = RemoteNode(deadline_s=0.2)
        with pytest.raises(ApiServerError, match="does not answer"):
            await asyncio.to_thread(node.read)

        node = RemoteNode()
        own, other = socket.socketpair()
        reading = asyncio.create_task(asyncio.to_thread(node.read))
        serving = asyncio.create_task(node.serve(own))
        request = await asyncio.to_thread(framing.read, other.fileno())
        assert request == {"number": 1, "operation": "read", "arguments": {}}
        other.close()
        with pytest.raises(ApiServerError, match="has ended"):
            await reading
        await serving

    run(scenario)


@pytest.mark.parametrize(
    "message",
    [
        [],
        {},
        {"changed": 1},
        {"label": "a"},
        {"watch_error": "down"},
        {"watch_error": ["down", "", "404"]},
        {"number": 1, "error": ["down", None, 0]},
        {"number": 1, "result": None, "more": 1},
    ],
)
def test_what_is_not_an_answer_ends_the_connection(message: Any) -> None:
    """The child parses what others send: the agent does not guess what it means."""

    async def scenario() -> None:
        own, other = socket.socketpair()
        other.sendall(framing.encode(message))
        await RemoteNode().serve(own)
        other.close()

    run(scenario)


@pytest.mark.parametrize(
    "result",
    [None, {"labels": {"a": 1}, "version": "1", "uid": ""}, {"labels": {}, "version": "1"}, [7]],
)
def test_a_wrong_result_is_an_error(result: Any) -> None:
    """Which the manager treats like any other of the API server."""

    async def scenario() -> None:
        node = RemoteNode()
        own, other = socket.socketpair()
        serving = asyncio.create_task(node.serve(own))
        for number, call in enumerate((node.read, lambda: node.pods([])), 1):
            calling = asyncio.create_task(asyncio.to_thread(call))
            await asyncio.to_thread(framing.read, other.fileno())
            # That of an earlier request, which was too late, counts for nothing.
            for one in (number - 1, number):
                other.sendall(framing.encode({"number": one, "result": result}))
            with pytest.raises(ApiServerError, match="wrong answer"):
                await calling
        other.close()
        await serving

    run(scenario)


def test_the_agent_has_no_http_client() -> None:
    """What is root in the agent imports none: it would take 11 MiB, and parse what others send."""
    modules = (
        *("cli.agent", "services.agent", "services.node_relay", "services.relay"),
        *("cli.mig_manager", "services.mig_manager", "mig.manager", "mig.host_state"),
        *("cli.device_plugin", "services.device_plugin", "cli.mps_daemon", "services.mps_daemon"),
        *("cli.feature_discovery", "services.label_rights", "cli.exporter"),
    )
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module('gpunode.' + name)\n"
        "assert not {'httpx2', 'lightkube'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, *modules], check=True)
