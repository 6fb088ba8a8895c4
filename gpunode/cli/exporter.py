# SPDX-License-Identifier: Apache-2.0
"""`gpu-node exporter`: the options of dcgm-exporter, and the service."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import click

from gpunode import service_log
from gpunode.cli import options

if TYPE_CHECKING:
    from gpunode.services.exporter import Exporter
    from gpunode.services.observation import Measuring
    from gpunode.services.surroundings import Surroundings

POD_RESOURCES = "/var/lib/kubelet/pod-resources/kubelet.sock"


@click.command()
@click.option(
    "--listen",
    default=":9400",
    envvar="DCGM_EXPORTER_LISTEN",
    metavar="ADDRESS",
    help="HOST:PORT of /metrics and of the probes.  [default: :9400]",
)
@click.option(
    "--collectors",
    "-f",
    default="",
    envvar="DCGM_EXPORTER_COLLECTORS",
    metavar="FILE",
    help="File that selects metrics: FIELD, TYPE, HELP.  [default: all metrics]",
)
@click.option(
    "--kubernetes",
    type=bool,
    is_flag=False,
    flag_value="true",
    default=None,
    envvar="DCGM_EXPORTER_KUBERNETES",
    metavar="BOOLEAN",
    help="Name the pods that use the devices.  [default: true where the kubelet's directory is]",
)
@click.option(
    "--pod-resources-socket",
    default=POD_RESOURCES,
    envvar="DCGM_POD_RESOURCES_KUBELET_SOCKET",
    metavar="PATH",
    help=f"Socket of the kubelet's list of devices.  [default: {POD_RESOURCES}]",
)
@click.option(
    "--resource-names",
    default="",
    envvar="NVIDIA_RESOURCE_NAMES",
    metavar="NAMES",
    help="Further resources with GPUs, separated by commas; those of nvidia.com always count.",
)
@click.option(
    "--hostname",
    default="",
    envvar="NODE_NAME",
    metavar="NAME",
    help="Value of the label hostname.  [default: the name of this machine]",
)
@click.option(
    "--no-hostname",
    is_flag=True,
    envvar="DCGM_EXPORTER_NO_HOSTNAME",
    help="Leave out the label hostname.",
)
@click.option(
    "--nvidia-driver-root",
    default="/",
    envvar=["CONTAINER_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH", "NVIDIA_DRIVER_ROOT"],
    metavar="PATH",
    help="Directory below which the driver is installed, as this program sees it.  [default: /]",
)
@click.option("--once", is_flag=True, help="Print one scrape on standard output, and exit.")
@click.option(
    "--healthz",
    default="",
    envvar="HEALTHZ",
    metavar="ADDRESS",
    help="Another HOST:PORT of the probes /livez, /readyz and /healthz.  [default: none]",
)
@options.log_format
def exporter(
    *,
    once: bool,
    log_format: str,
    pod_resources_socket: str,
    kubernetes: bool | None,
    **values: Any,  # noqa: ANN401 (by the option)
) -> None:
    """Serve metrics of the GPUs for Prometheus.

    The metrics, labels and units are those of dcgm-exporter where NVML has the value. If it is
    started by root, only a process that asks the kubelet remains root: what reads the answers and
    serves requests is the user nobody.
    """
    service_log.start(log_format)
    if kubernetes is None:
        kubernetes = os.path.isdir(os.path.dirname(pod_resources_socket))
    # Before files are opened or threads are started; the files of options are read without rights.
    connection = None
    if kubernetes:
        from gpunode.kubelet import pod_resources  # noqa: PLC0415
        from gpunode.services import least_rights  # noqa: PLC0415

        connection = least_rights.split(
            lambda end: pod_resources.forward(end, pod_resources_socket),
            least_rights.groups_of_nodes(values["nvidia_driver_root"]),
        )
    elif os.geteuid() == 0:
        from gpunode.services import least_rights  # noqa: PLC0415

        least_rights.drop_rights(least_rights.groups_of_nodes(values["nvidia_driver_root"]))
    import asyncio  # noqa: PLC0415 (--help and errors do not need the service)

    from gpunode.services import standalone  # noqa: PLC0415
    from gpunode.watch.watcher import Watcher  # noqa: PLC0415

    root = values["nvidia_driver_root"]

    async def serve() -> None:
        exporter = service(values, connection, lambda: Watcher(driver_root=root, dev_root=root))
        if once:
            click.echo(await exporter.once(), nl=False)
        else:
            await standalone.run(exporter, values["healthz"])

    asyncio.run(serve())


def agent_service(ctx: click.Context, surroundings: Surroundings) -> Exporter:
    """Return the service of the options in *ctx* for the agent; raise ConfigError."""
    from gpunode.plugin_spec import Roots  # noqa: PLC0415
    from gpunode.services.surroundings import PODS  # noqa: PLC0415

    asks_kubelet = ctx.params["kubernetes"]
    if asks_kubelet is None:
        asks_kubelet = os.path.isdir(os.path.dirname(ctx.params["pod_resources_socket"]))
    # The roots are those of the agent's watcher.
    here = Roots("/", "/", "/", "/")
    connection = surroundings.connections[PODS] if asks_kubelet else None
    return service(ctx.params, connection, lambda: surroundings.watch(here))


def service(
    values: Mapping[str, Any],
    connection: socket.socket | None,
    watch: Callable[[], AbstractAsyncContextManager[Measuring]],
) -> Exporter:
    """Return the service; raise ConfigError."""
    from gpunode import collectors  # noqa: PLC0415
    from gpunode.kubelet.pod_resources import PodResources  # noqa: PLC0415
    from gpunode.metrics import Settings  # noqa: PLC0415
    from gpunode.services.exporter import Exporter, Options  # noqa: PLC0415

    selected = collectors.Collectors()
    if values["collectors"]:
        selected = collectors.read(values["collectors"])
    log = logging.getLogger(__name__)
    for sentence in selected.warnings:
        log.warning("%s", sentence)
    hostname = "" if values["no_hostname"] else values["hostname"] or socket.gethostname()
    options = Options(
        values["listen"],
        Settings(selected.metrics, selected.labels, hostname),
        tuple(name.strip() for name in values["resource_names"].split(",") if name.strip()),
    )
    pods = PodResources(connection) if connection is not None else None
    return Exporter(watch, pods, options)
