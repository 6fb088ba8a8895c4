# SPDX-License-Identifier: Apache-2.0
"""`gpu-node agent`: several services in one process, with one watcher."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpunode import service_log
from gpunode.cli.main import COMMANDS
from gpunode.config.settings import AUTO
from gpuruntime.errors import ArgumentError

if TYPE_CHECKING:
    from gpunode.config.file import ConfigFile
    from gpunode.services.agent import Agent

DEVICE_PLUGIN, EXPORTER, FEATURE_DISCOVERY = "device-plugin", "exporter", "feature-discovery"
MIG_MANAGER = "mig-manager"
_SCHEMA = str(Path(__file__).parent.parent / "config" / "agent_schema.json")
# Options that the agent has for all of its services.
_OF_AGENT = ("healthz", "log-format", "once", "oneshot", "nvidia-driver-root")
_CONFIG_FILE = "config-file"


@click.command()
@click.option(
    "--config",
    "config_path",
    required=True,
    envvar="AGENT_CONFIG",
    metavar="FILE",
    help="File that names the services and their options.",
)
@click.option(
    "--log-format",
    type=click.Choice(service_log.FORMATS),
    default=service_log.TEXT,
    envvar="LOG_FORMAT",
    help="Form of the log lines on standard error.  [default: text]",
)
def agent(*, config_path: str, log_format: str) -> None:
    """Run several services in one process.

    They share one watcher of the driver. The exporter is a child process of the user nobody, which
    gets what the watcher reports. SIGHUP has each service read its config file again.
    """
    service_log.start(log_format)
    file = read(config_path)
    contexts = {name: context(file, name) for name in file.get(("services",))}
    import asyncio  # noqa: PLC0415 (--help and errors do not need the services)

    exporter = None
    if EXPORTER in contexts:
        # Before files are opened or threads are started.
        exporter = _start_exporter(contexts.pop(EXPORTER))

    async def serve() -> None:
        await _agent(file, contexts, exporter).run()

    asyncio.run(serve())


def read(path: str) -> ConfigFile:
    """Return the config file of the agent; raise ConfigError."""
    from gpunode.config import file as files  # noqa: PLC0415

    return files.read(path, _SCHEMA)


def context(file: ConfigFile, name: str) -> click.Context:
    """Return the options of the service *name*, as its command has them; raise ConfigError."""
    module, attribute, _ = COMMANDS[name]
    command: click.Command = getattr(importlib.import_module(module), attribute)
    place = ("services", name)
    options: dict[str, Any] = file.get(place) or {}
    for option in options:
        is_shared = option == _CONFIG_FILE and name != MIG_MANAGER
        if is_shared or option in _OF_AGENT:
            problem = f'"services.{name}.{option}" is not a setting of one service'
            raise file.error((*place, option), problem, "remove it: the agent has it for all")
    if name == DEVICE_PLUGIN:
        options = {"device-list-strategy": AUTO, **options}
    arguments = [f"--{option}={_text(value)}" for option, value in options.items()]
    if name != EXPORTER:
        shared = {"nvidia-driver-root": ("driver-root",)}
        if name != MIG_MANAGER:
            # That of the manager is another file.
            shared[_CONFIG_FILE] = (_CONFIG_FILE,)
        arguments += [f"--{key}={file.get(at)}" for key, at in shared.items() if file.get(at)]
    try:
        return command.make_context(name, arguments)
    except click.UsageError as error:
        problem = f'cannot use "services.{name}": {error.format_message()}'
        raise file.error(place, problem, f'"gpu-node {name} --help" has the options') from error


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _start_exporter(ctx: click.Context) -> tuple[int, socket.socket]:
    """Start the exporter as the user nobody; return its process, and the socket for the relay."""
    from gpunode.kubelet import pod_resources  # noqa: PLC0415
    from gpunode.services import least_rights  # noqa: PLC0415

    path = ctx.params["pod_resources_socket"]
    asks_kubelet = ctx.params["kubernetes"]
    if asks_kubelet is None:
        asks_kubelet = os.path.isdir(os.path.dirname(path))
    relay, their_relay = socket.socketpair()
    pods, their_pods = socket.socketpair()
    pid = least_rights.start_child()
    if pid == 0:
        relay.close()
        pods.close()
        _run_exporter(ctx, their_pods if asks_kubelet else None, their_relay)
    their_relay.close()
    their_pods.close()
    threading.Thread(target=pod_resources.forward, args=(pods, path), daemon=True).start()
    return pid, relay


def _run_exporter(ctx: click.Context, pods: socket.socket | None, relay: socket.socket) -> None:
    """Serve until a signal, and exit."""
    import asyncio  # noqa: PLC0415
    import sys  # noqa: PLC0415

    from gpunode.cli.exporter import service  # noqa: PLC0415
    from gpunode.services.exporter import Exporter  # noqa: PLC0415
    from gpunode.services.shared_watcher import RelayedWatcher  # noqa: PLC0415
    from gpuruntime.errors import GpuRuntimeError  # noqa: PLC0415

    exporter: Exporter

    async def serve() -> None:
        nonlocal exporter
        watcher = RelayedWatcher(relay, lambda: exporter.report().is_ready)
        exporter = service(ctx.params, pods, lambda: watcher)
        await exporter.run()

    try:
        asyncio.run(serve())
    except GpuRuntimeError as error:
        print(f"error: {error.lines()}", file=sys.stderr)  # noqa: T201 (messages go to stderr)
        os._exit(error.exit_code)
    os._exit(0)


def _agent(
    file: ConfigFile,
    contexts: dict[str, click.Context],
    exporter: tuple[int, socket.socket] | None,
) -> Agent:
    """Return the agent with the services of *contexts*; raise ArgumentError or ConfigError."""
    from gpunode.config.effective import Config  # noqa: PLC0415
    from gpunode.services.agent import Agent, Service  # noqa: PLC0415
    from gpunode.services.observation import watcher  # noqa: PLC0415
    from gpunode.services.shared_watcher import SharedWatcher  # noqa: PLC0415
    from gpunode.services.spec_files import roots  # noqa: PLC0415

    root = file.get(("driver-root",)) or "/"
    observed = watcher(roots(Config(nvidia_driver_root=root, nvidia_dev_root=root)))
    services: dict[str, Service] = {}
    for name, ctx in contexts.items():
        module = importlib.import_module(COMMANDS[name][0])
        services[name] = module.service(ctx, lambda _: SharedWatcher(observed))
    plugin = services.get(DEVICE_PLUGIN)
    config = getattr(plugin, "config", None)
    if config is not None and config.nvidia_driver_root != root:
        raise ArgumentError(
            f'the device plugin has the driver root "{config.nvidia_driver_root}", and the agent '
            f'"{root}"',
            'set "driver-root" in the config of the agent',
        )
    return Agent(observed, services, exporter, healthz=file.get(("healthz",)) or "")
