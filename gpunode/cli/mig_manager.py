# SPDX-License-Identifier: Apache-2.0
"""`gpu-node mig-manager`: the options of the manager of MIG, and the service."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from gpunode import service_log
from gpunode.cli import options
from gpunode.config import settings
from gpuruntime.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from gpunode.mig.node import Node
    from gpunode.services.mig_manager import MigManager
    from gpunode.services.observation import Holdable
    from gpunode.services.surroundings import Surroundings

PAUSE_FILE = "/var/lib/gpu-node/mig-manager.json"
_NODE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?\Z")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@click.command()
@click.option(
    "--config-file",
    "-f",
    required=True,
    envvar=["CONFIG_FILE", "MIG_PARTED_CONFIG_FILE"],
    metavar="FILE",
    help="File of MIG configs, as of gpu-node mig.",
)
@click.option(
    "--hooks-file",
    "-k",
    default="",
    envvar="MIG_PARTED_HOOKS_FILE",
    metavar="FILE",
    help="File of programs to run before and after changes.",
)
@options.node_name
@options.kubeconfig
@click.option(
    "--default-gpu-clients-namespace",
    "namespace",
    default="",
    envvar="DEFAULT_GPU_CLIENTS_NAMESPACE",
    metavar="NAME",
    help="Namespace of the operands' pods.  [default: that of the pod]",
)
@click.option(
    "--operand",
    "more_operands",
    multiple=True,
    envvar="GPU_NODE_MIG_OPERANDS",
    metavar="NAME[=APP]",
    help="Another operand to pause: the end of its label nvidia.com/gpu.deploy.NAME, and the "
    "label app of its pods.",
)
@options.boolean(
    "--with-shutdown-host-gpu-clients",
    "stops_services",
    variable="WITH_SHUTDOWN_HOST_GPU_CLIENTS",
    default=False,
    text="Stop the services of --gpu-clients-file for a change.",
)
@click.option(
    "--gpu-clients-file",
    default="",
    envvar="GPU_CLIENTS_FILE",
    metavar="FILE",
    help="File of the host's services that use GPUs.",
)
@click.option(
    "--pods-timeout",
    default="5m",
    envvar="GPU_NODE_MIG_PODS_TIMEOUT",
    metavar="DURATION",
    help="How long the pods of paused operands may take to end.  [default: 5m]",
)
@options.boolean(
    "--with-reboot",
    variable="WITH_REBOOT",
    default=False,
    text="Reboot the node if a MIG mode needs it.",
)
@click.option(
    "--host-root-mount",
    default="/",
    envvar="HOST_ROOT_MOUNT",
    metavar="PATH",
    help="Root of the host, whose reboot and systemctl are run.  [default: /]",
)
@options.mig_host
@click.option(
    "--pause-file",
    default=PAUSE_FILE,
    envvar="GPU_NODE_MIG_PAUSE_FILE",
    metavar="FILE",
    help=f"File of the operands to restore; it has to survive a reboot.  [default: {PAUSE_FILE}]",
)
@options.healthz
@options.log_format
@click.pass_context
def mig_manager(ctx: click.Context, /, *, log_format: str, **_: Any) -> None:  # noqa: ANN401
    """Partition the GPUs of this node as the label nvidia.com/mig.config says.

    The label nvidia.com/mig.config.state says how that goes: pending, rebooting, success or
    failed. Events of the node have the reasons. SIGHUP has the config applied again.
    """
    service_log.start(log_format)
    import asyncio  # noqa: PLC0415 (--help and errors do not need the service)

    from gpunode.services import standalone  # noqa: PLC0415

    async def serve() -> None:
        manager = service(ctx, lambda: _node(ctx.params), lambda: _label_values(ctx.params))
        await standalone.run(manager, ctx.params["healthz"])

    asyncio.run(serve())


def agent_service(ctx: click.Context, surroundings: Surroundings) -> MigManager:
    """Return the service of the options in *ctx* for the agent; raise as `service` does."""
    node = surroundings.mig_node
    assert node is not None
    return service(ctx, lambda: node, node.values, surroundings.holdable)


def service(
    ctx: click.Context,
    connect_node: Callable[[], Node],
    label_values: Callable[[], AsyncIterator[object]],
    watcher: Holdable | None = None,
) -> MigManager:
    """Return the service of the options in *ctx*; raise ArgumentError or ConfigError.

    *connect_node* returns the node or raises ApiServerError, *label_values* yields after each
    change of the label of the config. *watcher* is that of the process, which is held while a MIG
    mode changes.
    """
    from gpunode import mig_config  # noqa: PLC0415
    from gpunode.mig import commands, host_state, operands  # noqa: PLC0415
    from gpunode.mig.host import Host  # noqa: PLC0415
    from gpunode.mig.host_services import HostServices  # noqa: PLC0415
    from gpunode.mig.manager import Manager, Options  # noqa: PLC0415
    from gpunode.services.mig_manager import Hold, MigManager, Signals  # noqa: PLC0415

    values = ctx.params
    if not values["node_name"]:
        raise ArgumentError(
            "the name of the node is empty", "set NODE_NAME from spec.nodeName of the pod"
        )
    if not _NODE_NAME.match(values["node_name"]):
        raise ArgumentError(
            f'--node-name is "{values["node_name"]}", not the name of a node',
            'use a name of "kubectl get nodes"',
        )
    pods_timeout_s = settings.duration(values["pods_timeout"])
    if pods_timeout_s is None or pods_timeout_s < 0:
        raise ArgumentError(
            f'--pods-timeout is "{values["pods_timeout"]}", not a duration',
            "use 5m, for example",
        )
    # Errors of the files end the command now; later they are those of one change.
    mig_config.read(values["config_file"])
    commands.HookFile(values["hooks_file"], {})
    root = values["host_root_mount"]
    services = None
    if values["stops_services"]:
        if not values["gpu_clients_file"]:
            raise ArgumentError(
                "the services to stop are not named", "name their file: --gpu-clients-file"
            )
        services = HostServices(values["gpu_clients_file"], root)
    driver_root = values["driver_root"]

    def reboot() -> None:
        command = ["reboot"] if root == "/" else ["chroot", root, "reboot"]
        commands.run("the reboot", command)

    options = Options(
        values["config_file"],
        values["pause_file"],
        values["hooks_file"],
        {**operands.OPERANDS, **dict(map(operands.parse, values["more_operands"]))},
        services,
        pods_timeout_s,
        reboot if values["with_reboot"] else None,
        refresh=lambda: host_state.renew(driver_root, root),
        boot_id=_boot_id(),
    )
    node = connect_node()
    host = Host(driver_root, values["state_directory"], values["timeout"])

    def make(signals: Signals, hold: Hold) -> Manager:
        return Manager(node, host, replace(options, hold=hold), signals.stop, signals.wake)

    return MigManager(make, label_values, watcher)


def _node(values: Mapping[str, Any]) -> Node:
    """Return the node in the API server; raise ApiServerError."""
    # A process that does not ask the API server itself saves the memory of its client.
    from gpunode.api.client import connect  # noqa: PLC0415
    from gpunode.api.mig_node import MigNode  # noqa: PLC0415

    client = connect(values["kubeconfig"])
    return MigNode(client, values["node_name"], values["namespace"] or client.namespace)


def _label_values(values: Mapping[str, Any]) -> AsyncIterator[str | None]:
    from gpunode.api.client import connect_async  # noqa: PLC0415
    from gpunode.api.node_watch import label_values  # noqa: PLC0415
    from gpunode.mig.node import CONFIG_LABEL  # noqa: PLC0415

    client = connect_async(values["kubeconfig"])
    return label_values(client, values["node_name"], CONFIG_LABEL)


def _boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""
