# SPDX-License-Identifier: Apache-2.0
"""`gpu-node agent`: several services in one program, with one watcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

import click

from gpunode import service_log
from gpunode.cli import agent_services, options
from gpunode.cli.agent_services import EXPORTER, FEATURE_DISCOVERY, MIG_MANAGER, SERVICES
from gpunode.config.schema_check import CHECKER
from gpunode.watch.child_handle import import_path
from gpuruntime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpunode.config.file import ConfigFile
    from gpunode.services.agent import Agent
    from gpunode.services.config_choice import ConfigChoice
    from gpunode.services.node_relay import RemoteNode
    from gpunode.services.unprivileged import Helper


@click.command()
@click.option(
    "--config",
    "config_path",
    required=True,
    envvar="AGENT_CONFIG",
    metavar="FILE",
    help="File that names the services and their options.",
)
@options.log_format
def agent(*, config_path: str, log_format: str) -> None:
    """Run several services in one program.

    They share one watcher of the driver. Only what must be root is: what serves HTTP and reads the
    answers of the kubelet and the API server is a child process of the user nobody. A service or
    process that ends is started again, and does not end the others. SIGHUP has each service read
    its config file again.
    """
    service_log.start(log_format)
    CHECKER.import_path = import_path()
    file = agent_services.read(config_path)
    arguments = {name: agent_services.arguments(file, name) for name in file.get(("services",))}

    async def serve() -> None:
        await _agent(file, arguments, log_format).run()

    asyncio.run(serve())


def _agent(file: ConfigFile, arguments: Mapping[str, list[str]], log_format: str) -> Agent:
    """Return the agent with the services of *arguments*; raise ArgumentError or ConfigError."""
    from gpunode.config.effective import Config  # noqa: PLC0415
    from gpunode.services.agent import Agent  # noqa: PLC0415
    from gpunode.services.node_relay import RemoteNode  # noqa: PLC0415
    from gpunode.services.observation import watcher  # noqa: PLC0415
    from gpunode.services.service_group import ServiceGroup  # noqa: PLC0415
    from gpunode.services.spec_files import roots  # noqa: PLC0415
    from gpunode.services.surroundings import Surroundings  # noqa: PLC0415

    root = file.get(("driver-root",)) or "/"
    observed = watcher(roots(Config(nvidia_driver_root=root, nvidia_dev_root=root)))
    choice = choice_of(file)
    surroundings = Surroundings(
        lambda _: contextlib.nullcontext(observed),
        choice.load_path,
        driver_root=root,
        holdable=observed,
        mig_node=RemoteNode() if MIG_MANAGER in arguments else None,
    )
    contexts = {name: agent_services.context(name, texts) for name, texts in arguments.items()}
    makers = {
        name: agent_services.maker(name, ctx, surroundings)
        for name, ctx in contexts.items()
        if SERVICES[name].is_root
    }
    result = Agent(observed, ServiceGroup(makers), choice)
    _add_child(result, file, contexts, arguments, log_format, surroundings.mig_node)
    return result


def choice_of(file: ConfigFile) -> ConfigChoice:
    """Return the config file that the services use, or the choice of one; raise ConfigError."""
    from gpunode.config import named  # noqa: PLC0415
    from gpunode.services.config_choice import ConfigChoice, NamedConfigs  # noqa: PLC0415

    section: dict[str, Any] | None = file.get(("node-config",))
    if section is None:
        return ConfigChoice(file.get(("config-file",)) or "")
    if file.get(("config-file",)):
        raise file.error(
            ("config-file",),
            '"config-file" and "node-config" exclude each other',
            "remove one of them",
        )
    strategies = section.get("fallback-strategies", [named.NAMED, named.SINGLE])
    configs = NamedConfigs(section["directory"], section.get("default", ""), tuple(strategies))
    return ConfigChoice("", configs)


def _add_child(
    agent_: Agent,
    file: ConfigFile,
    contexts: Mapping[str, click.Context],
    arguments: Mapping[str, list[str]],
    log_format: str,
    mig_node: RemoteNode | None,
) -> None:
    """Give the agent a child without rights if anything is to run in it.

    *mig_node* is the node that the child asks the API server for, None without a manager of MIG.
    """
    from gpunode.services import http_server, relay  # noqa: PLC0415
    from gpunode.services.surroundings import LABELS, MIG_NODE, PODS  # noqa: PLC0415
    from gpunode.services.unprivileged import Unprivileged  # noqa: PLC0415

    names = [name for name in arguments if not SERVICES[name].is_root]
    healthz = file.get(("healthz",)) or ""
    section = file.get(("node-config",))
    if not names and not healthz and section is None and mig_node is None:
        return
    if healthz:
        http_server.address(healthz, "healthz")
    helpers: dict[str, Helper] = {}
    if EXPORTER in contexts:
        helpers[PODS] = _pods(contexts[EXPORTER].params["pod_resources_socket"])
    if FEATURE_DISCOVERY in contexts:
        helpers[LABELS] = _labels(contexts[FEATURE_DISCOVERY], agent_.choice)
    options: dict[str, Any] = {
        "log_format": log_format,
        "healthz": healthz,
        "services": {name: arguments[name] for name in names},
        "node_config": _node(file, section),
        "mig": None,
        "parent": os.getpid(),
    }
    if mig_node is not None:
        helpers[MIG_NODE] = mig_node.serve
        params = contexts[MIG_MANAGER].params
        options["mig"] = {name: params[name] for name in ("node_name", "namespace", "kubeconfig")}

    def server_end(connection: socket.socket) -> relay.ServerEnd:
        return relay.ServerEnd(
            agent_.watcher,
            connection,
            agent_.report,
            agent_.choice.take,
            lambda: agent_.choice.path,
        )

    agent_.child = Unprivileged(options, server_end, helpers)

    def use_choice() -> None:
        agent_.group.reload()
        agent_.send_config()

    agent_.choice.on_change = use_choice


def _node(file: ConfigFile, section: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return which label of which node names the config; raise ConfigError."""
    from gpunode.config import named  # noqa: PLC0415

    if section is None:
        return None
    name = section.get("node-name") or os.environ.get("NODE_NAME", "")
    if not name:
        raise file.error(
            ("node-config",),
            "the name of the node is empty",
            "set NODE_NAME from spec.nodeName of the pod",
        )
    return {
        "name": name,
        "label": section.get("node-label") or named.NODE_LABEL,
        "kubeconfig": section.get("kubeconfig") or "",
    }


def _pods(path: str) -> Helper:
    from gpunode.kubelet import pod_resources  # noqa: PLC0415

    async def serve(connection: socket.socket) -> None:
        await pod_resources.forward_on_loop(connection, path)

    return serve


def _labels(ctx: click.Context, choice: ConfigChoice) -> Helper:
    """Return what reads the machine and writes the file of labels, for the config in force."""
    from gpunode.cli import feature_discovery  # noqa: PLC0415
    from gpunode.services import label_rights  # noqa: PLC0415

    last = feature_discovery.label_files(ctx, "")

    def files() -> tuple[str, str]:
        nonlocal last
        try:
            last = feature_discovery.label_files(ctx, choice.load_path())
        except ConfigError:
            # The config in force is that of before.
            pass
        return last

    async def serve(connection: socket.socket) -> None:
        await asyncio.to_thread(label_rights.serve, connection, files)

    return serve
