# SPDX-License-Identifier: Apache-2.0
"""`gpu-node config-manager`: the options of the incumbent's sidecar, and the service."""

from __future__ import annotations

import signal as signals
from typing import TYPE_CHECKING, Any

import click

from gpunode import service_log
from gpunode.cli import options
from gpunode.config import named
from gpuruntime.errors import ArgumentError

if TYPE_CHECKING:
    from gpunode.services.config_manager import ConfigManager

_PROCESS = "nvidia-device-plugin"


@click.command()
@options.node_name
@click.option(
    "--node-label",
    default=named.NODE_LABEL,
    envvar="NODE_LABEL",
    metavar="NAME",
    help=f"Label whose value is the name of a config.  [default: {named.NODE_LABEL}]",
)
@click.option(
    "--config-file-srcdir",
    required=True,
    envvar="CONFIG_FILE_SRCDIR",
    metavar="PATH",
    help="Directory with the configs, each a file.",
)
@click.option(
    "--config-file-dst",
    required=True,
    envvar="CONFIG_FILE_DST",
    metavar="PATH",
    help="Symlink to the config in force, which the plugin reads.",
)
@click.option(
    "--default-config",
    default="",
    envvar="DEFAULT_CONFIG",
    metavar="NAME",
    help="Config of a node without the label.  [default: by --fallback-strategies]",
)
@click.option(
    "--fallback-strategies",
    default="",
    envvar="FALLBACK_STRATEGIES",
    metavar="WORDS",
    help="Without a default, separated by commas: named (the config called default), single (the "
    "only config), empty (none).",
)
@options.boolean(
    "--send-signal",
    variable="SEND_SIGNAL",
    default=True,
    text="Send a signal to the plugin after a change.",
)
@click.option(
    "--signal",
    type=click.IntRange(1, 64),
    default=int(signals.SIGHUP),
    envvar="SIGNAL",
    metavar="NUMBER",
    help="Number of that signal.  [default: 1]",
)
@click.option(
    "--process-to-signal",
    default=_PROCESS,
    envvar="PROCESS_TO_SIGNAL",
    metavar="NAME",
    help=f'Program of the plugin, or "gpu-node device-plugin".  [default: {_PROCESS}]',
)
@options.boolean(
    "--oneshot", variable="ONESHOT", default=False, text="Set the symlink once, and exit."
)
@options.kubeconfig
@options.healthz
@options.log_format
def config_manager(*, log_format: str, oneshot: bool, **values: Any) -> None:  # noqa: ANN401
    """Choose the config of a device plugin by a label of the node.

    For a device plugin in another container of the pod, with a shared PID namespace; the agent
    does the same by itself. A label that names no config changes nothing: the log and the probes
    say so.
    """
    service_log.start(log_format)
    import asyncio  # noqa: PLC0415 (--help and errors do not need the service)

    async def serve() -> None:
        manager = _manager(values)
        await (manager.once() if oneshot else manager.run())

    asyncio.run(serve())


def _manager(values: dict[str, Any]) -> ConfigManager:
    """Return the service; raise ArgumentError, ConfigError or ApiServerError."""
    if not values["node_name"]:
        raise ArgumentError(
            "the name of the node is empty", "set NODE_NAME from spec.nodeName of the pod"
        )
    from gpunode.api.client import connect_async  # noqa: PLC0415
    from gpunode.api.node_watch import label_values  # noqa: PLC0415
    from gpunode.services.config_choice import NamedConfigs, strategies_of  # noqa: PLC0415
    from gpunode.services.config_manager import ConfigManager, Target  # noqa: PLC0415

    words = [word.strip() for word in values["fallback_strategies"].split(",") if word.strip()]
    configs = NamedConfigs(
        values["config_file_srcdir"], values["default_config"], strategies_of(words)
    )
    client = connect_async(values["kubeconfig"])
    return ConfigManager(
        lambda: label_values(client, values["node_name"], values["node_label"]),
        configs,
        values["config_file_dst"],
        Target(values["process_to_signal"], values["signal"] if values["send_signal"] else None),
        healthz=values["healthz"],
    )
