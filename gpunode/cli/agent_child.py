# SPDX-License-Identifier: Apache-2.0
"""The program of the agent's child: the services without rights, and the agent's page."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Never, TypeVar

from gpunode import service_log
from gpunode.cli import agent_services
from gpunode.cli.agent_services import FEATURE_DISCOVERY
from gpunode.config.schema_check import CHECKER
from gpunode.mig.node import CONFIG_LABEL
from gpunode.services import least_rights
from gpunode.services.agent_page import AgentPage
from gpunode.services.config_choice import ConfigChoice
from gpunode.services.node_label import NodeLabel
from gpunode.services.node_relay import NodeServer
from gpunode.services.relay import ClientEnd
from gpunode.services.service_group import ServiceGroup
from gpunode.services.surroundings import MIG_NODE, Surroundings
from gpunode.services.turns import STOP_SIGNALS
from gpunode.services.unprivileged import RELAY
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.system import syscalls

if TYPE_CHECKING:
    import click
    from lightkube import AsyncClient, Client

T = TypeVar("T")

_PAGE, _NODE_LABEL = "healthz", "node-config"


def main(options: dict[str, Any]) -> None:
    """Serve until a signal, or until the agent ends, and exit."""
    service_log.start(options["log_format"])
    CHECKER.import_path = options["path"]
    # The agent passes on what these mean.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    try:
        contexts = {
            name: agent_services.context(name, texts)
            for name, texts in options["services"].items()
        }
        # Its files may be root's.
        client = _client(contexts.get(FEATURE_DISCOVERY))
        values = _label_values(options["node_config"])
        mig = _mig_node(options["mig"])
        if os.geteuid() == 0:
            least_rights.drop_rights()
        # After the change of user, which would cancel it.
        syscalls.die_with_parent()
        if os.getppid() != options["parent"]:
            os._exit(1)
        asyncio.run(_serve(options, contexts, client, values, mig))
    except GpuRuntimeError as error:
        print(f"error: {error.lines()}", file=sys.stderr)  # noqa: T201 (messages go to stderr)
        os._exit(error.exit_code)
    # Without the end of threads that may wait for the API server.
    os._exit(0)


async def _serve(
    options: Mapping[str, Any],
    contexts: Mapping[str, click.Context],
    client: Callable[[], Any] | None,
    values: Callable[[], AsyncIterator[str | None]] | None,
    make_node: Callable[[socket.socket], NodeServer] | None,
) -> None:
    choice = ConfigChoice("")
    # The agent sends it.
    choice.path = ""

    def use_config(path: str) -> None:
        choice.path = path
        group.reload()

    sockets = {name: socket.socket(fileno=number) for name, number in options["sockets"].items()}
    link = ClientEnd(sockets[RELAY], use_config)
    surroundings = Surroundings(
        lambda _: contextlib.nullcontext(link), choice.load_path, sockets, client
    )
    makers = {
        name: agent_services.maker(name, ctx, surroundings) for name, ctx in contexts.items()
    }
    if values is not None:
        makers[_NODE_LABEL] = lambda: NodeLabel(values, link.send_label)
    if options["healthz"]:
        makers[_PAGE] = lambda: AgentPage(options["healthz"], link, group.reports)
    group = ServiceGroup(makers)
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(link.serve())]
    if make_node is not None:
        tasks.append(asyncio.create_task(make_node(sockets[MIG_NODE]).serve()))
    for task in tasks:
        # Without one of its connections this process is of no use.
        task.add_done_callback(lambda _: group.stop())
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, group.stop)
    await group.serve()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _client(ctx: click.Context | None) -> Callable[[], Any] | None:
    """Return what returns a client of the API server, which is made now if labels go there."""
    if ctx is None or not _publishes_to_server(ctx.params):
        return None
    return _connect(ctx.params["kubeconfig"])


def _publishes_to_server(params: Mapping[str, Any]) -> bool:
    is_pod = bool(params["node_name"] and os.environ.get("KUBERNETES_SERVICE_HOST"))
    return bool(
        params["use_node_feature_api"]
        or params["node_labels"]
        or (params["use_node_feature_api"] is None and is_pod)
    )


def _label_values(
    node: Mapping[str, str] | None,
) -> Callable[[], AsyncIterator[str | None]] | None:
    """Return what yields the values of the node's label, None if no label names the config."""
    if node is None:
        return None
    from gpunode.api.node_watch import label_values  # noqa: PLC0415

    client = _connect_async(node["kubeconfig"])
    return lambda: label_values(client(), node["name"], node["label"])


def _mig_node(
    values: Mapping[str, str] | None,
) -> Callable[[socket.socket], NodeServer] | None:
    """Return what serves the node to the manager of MIG, None if the agent has none."""
    if values is None:
        return None
    from gpunode.api.mig_node import MigNode  # noqa: PLC0415
    from gpunode.api.node_watch import label_values  # noqa: PLC0415

    name, client = values["node_name"], _connect(values["kubeconfig"])
    watching = _connect_async(values["kubeconfig"])

    def node() -> MigNode:
        return MigNode(client(), name, values["namespace"] or client().namespace)

    return lambda connection: NodeServer(
        connection, node, lambda: label_values(watching(), name, CONFIG_LABEL)
    )


# One client for all that use the same file: each has certificates, of 0.8 MiB with the usual ones.
@functools.cache
def _connect(kubeconfig: str) -> Callable[[], Client]:
    from gpunode.api.client import connect  # noqa: PLC0415

    return _result(lambda: connect(kubeconfig))


@functools.cache
def _connect_async(kubeconfig: str) -> Callable[[], AsyncClient]:
    from gpunode.api.client import connect_async  # noqa: PLC0415

    return _result(lambda: connect_async(kubeconfig))


def _result(make: Callable[[], T]) -> Callable[[], T]:
    """Call *make* now, and return what returns its result, or raises its error."""
    try:
        value = make()
    except GpuRuntimeError as error:
        failure = error

        def fail() -> Never:
            raise failure

        return fail
    return lambda: value
