# SPDX-License-Identifier: Apache-2.0
"""`gpu-node feature-discovery`: the options of GPU feature discovery, and the service."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpunode import service_log
from gpunode.cli import options
from gpunode.cli.device_plugin import load_config
from gpunode.config import settings
from gpunode.config.effective import OptionText
from gpuruntime.errors import ArgumentError

if TYPE_CHECKING:
    from lightkube import Client

    from gpunode.labels import Machine
    from gpunode.services.feature_discovery import FeatureDiscovery, Publisher
    from gpunode.services.label_rights import RootHalf
    from gpunode.services.observation import Watch
    from gpunode.services.surroundings import Surroundings

OUTPUT_FILE = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
_INFINITE = "infinite"
# Options that are settings of the device plugin, too.
_SETTINGS = ("mig_strategy", "fail_on_init_error", "nvidia_driver_root", "container_driver_root")
# Options that the config file can set, with their keys.
_KEYS = {
    "oneshot": ("flags", "gfd", "oneshot"),
    "no_timestamp": ("flags", "gfd", "noTimestamp"),
    "sleep_interval": ("flags", "gfd", "sleepInterval"),
    "output_file": ("flags", "gfd", "outputFile"),
    "machine_type_file": ("flags", "gfd", "machineTypeFile"),
    "use_node_feature_api": ("flags", "useNodeFeatureAPI"),
}


def _seconds(value: str | int) -> float | None:
    """Return the seconds of *value*, None for `infinite`; raise ArgumentError."""
    if value == _INFINITE:
        return None
    seconds = settings.duration(value)
    if seconds is None or seconds <= 0:
        raise ArgumentError(
            f'--sleep-interval is "{value}", not a duration', "use 60s, for example, or infinite"
        )
    return seconds


def _with_file(ctx: click.Context, values: dict[str, Any], config_file: str) -> dict[str, Any]:
    """Return *values* with those of the config file for options that nothing else sets."""
    if not config_file:
        return values
    from gpunode.config import file as files  # noqa: PLC0415

    source = files.read(config_file)
    in_file = {
        name: source.get(key)
        for name, key in _KEYS.items()
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT
    }
    return {**values, **{name: value for name, value in in_file.items() if value is not None}}


@click.command()
@click.option(
    "--mig-strategy",
    envvar=["GFD_MIG_STRATEGY", "MIG_STRATEGY"],
    metavar="WORD",
    help="How MIG devices are offered: none, single or mixed.  [default: none]",
)
@click.option(
    "--fail-on-init-error",
    is_flag=False,
    flag_value="true",
    envvar=["GFD_FAIL_ON_INIT_ERROR", "FAIL_ON_INIT_ERROR"],
    metavar="BOOLEAN",
    help="Exit if the driver does not answer at start; false: wait for it.  [default: true]",
)
@click.option(
    "--oneshot",
    is_flag=True,
    envvar="GFD_ONESHOT",
    help="Publish the labels once, and exit.",
)
@click.option(
    "--no-timestamp",
    is_flag=True,
    envvar="GFD_NO_TIMESTAMP",
    help="Leave out the label with the time of the config.",
)
@click.option(
    "--sleep-interval",
    default="60s",
    envvar="GFD_SLEEP_INTERVAL",
    metavar="DURATION",
    help="Time between two looks at what the driver does not report, or infinite.  [default: 60s]",
)
@click.option(
    "--output-file",
    "-o",
    default=OUTPUT_FILE,
    envvar="GFD_OUTPUT_FILE",
    metavar="FILE",
    help=f"File of labels, empty for standard output.  [default: {OUTPUT_FILE}]",
)
@click.option(
    "--machine-type-file",
    default="/sys/class/dmi/id/product_name",
    envvar="GFD_MACHINE_TYPE_FILE",
    metavar="FILE",
    help="File with the name of the machine.  [default: /sys/class/dmi/id/product_name]",
)
@click.option(
    "--use-node-feature-api",
    type=bool,
    is_flag=False,
    flag_value="true",
    default=None,
    envvar=["GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"],
    metavar="BOOLEAN",
    help="Write a NodeFeature object instead of the file.  [default: true in a pod that knows "
    "NODE_NAME, unless --output-file is set]",
)
@click.option(
    "--node-labels",
    is_flag=True,
    envvar="GFD_NODE_LABELS",
    help="Label the node itself instead of writing the file.",
)
@options.node_name
@click.option(
    "--namespace",
    default="",
    envvar="NAMESPACE",
    metavar="NAME",
    help="Namespace of the NodeFeature object.  [default: that of the pod]",
)
@options.kubeconfig
@click.option(
    "--nvidia-driver-root",
    envvar="NVIDIA_DRIVER_ROOT",
    metavar="PATH",
    help="Directory of the host below which the driver is installed.  [default: /]",
)
@click.option(
    "--container-driver-root",
    envvar=["CONTAINER_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH"],
    metavar="PATH",
    help="The driver root in the file system of this program.",
)
@click.option(
    "--config-file",
    default="",
    envvar=["GFD_CONFIG_FILE", "CONFIG_FILE"],
    metavar="FILE",
    help="Config file of the device plugin, version v1; SIGHUP reads it again.",
)
@options.healthz
@options.log_format
@click.pass_context
def feature_discovery(
    ctx: click.Context,
    /,
    *,
    log_format: str,
    **_: Any,  # noqa: ANN401 (by the option)
) -> None:
    """Publish labels that describe the GPUs of this node.

    The labels are those of GPU feature discovery. They stay when this program ends, and while the
    driver does not answer. If it is started by root, only a process that reads the machine and
    writes the file remains root: what asks the driver and the API server is the user nobody.
    """
    service_log.start(log_format)
    import asyncio  # noqa: PLC0415 (--help and errors do not need the service)

    from gpunode.services import standalone  # noqa: PLC0415
    from gpunode.services.observation import watcher  # noqa: PLC0415

    discovery = service(ctx, watcher, _split if os.geteuid() == 0 else None)

    async def serve() -> None:
        await standalone.run(discovery, ctx.params["healthz"])

    asyncio.run(serve())


def _split(values: Mapping[str, Any]) -> RootHalf:
    """Return the connection to a root process that reads the machine and writes the file."""
    from gpunode.services import label_rights, least_rights  # noqa: PLC0415

    files = values["machine_type_file"], values["output_file"]
    root = values["container_driver_root"] or values["nvidia_driver_root"] or "/"
    connection = least_rights.split(
        lambda end: label_rights.serve(end, lambda: files),
        least_rights.groups_of_nodes(root),
    )
    return label_rights.RootHalf(connection)


def agent_service(ctx: click.Context, surroundings: Surroundings) -> FeatureDiscovery:
    """Return the service of the options in *ctx* for the agent; raise as `service` does."""
    from gpunode.services.label_rights import RootHalf  # noqa: PLC0415
    from gpunode.services.surroundings import LABELS  # noqa: PLC0415

    root_half = RootHalf(surroundings.connections[LABELS])
    return service(
        ctx,
        surroundings.watch,
        lambda _: root_half,
        config_path=surroundings.config_path,
        client=surroundings.client,
    )


def label_files(ctx: click.Context, config_path: str) -> tuple[str, str]:
    """Return the paths of the machine's product and of the labels; raise ConfigError."""
    values = _with_file(ctx, ctx.params, config_path)
    return values["machine_type_file"], values["output_file"]


def service(
    ctx: click.Context,
    watch: Watch,
    split: Callable[[Mapping[str, Any]], RootHalf] | None = None,
    *,
    config_path: Callable[[], str] | None = None,
    client: Callable[[], Client] | None = None,
) -> FeatureDiscovery:
    """Return the service of the options in *ctx*; raise ArgumentError or ConfigError.

    *split* returns the root half, which reads the machine and writes the file of the labels, for
    the options; None: the service does both. *config_path* returns the path of the config file,
    *client* a client of the API server; None for those of the options.
    """
    from gpunode import machine  # noqa: PLC0415
    from gpunode.services.feature_discovery import FeatureDiscovery, Options  # noqa: PLC0415

    options = {
        name: OptionText(ctx.params[name], f"--{name.replace('_', '-')}")
        for name in _SETTINGS
        if ctx.params[name] is not None
    }
    path = config_path or (lambda: str(ctx.params["config_file"]))
    values = _with_file(ctx, ctx.params, path())
    if values["use_node_feature_api"] is None:
        is_file = ctx.get_parameter_source("output_file") is not ParameterSource.DEFAULT
        is_pod = bool(values["node_name"] and os.environ.get("KUBERNETES_SERVICE_HOST"))
        use_api = is_pod and not is_file and not values["node_labels"]
        values = {**values, "use_node_feature_api": use_api}
    publishers = _publishers(values, client)
    read_machine: Callable[[], Machine] = functools.partial(
        machine.read, values["machine_type_file"]
    )
    if split is not None:
        # After the files of the API server's access are read, before a thread is started.
        root_half = split(values)
        read_machine = root_half.machine
        if _is_file(values) and values["output_file"]:
            publishers = [root_half]
    return FeatureDiscovery(
        lambda: load_config(path(), options),
        publishers,
        Options(values["oneshot"], not values["no_timestamp"], _seconds(values["sleep_interval"])),
        watch=watch,
        read_machine=read_machine,
    )


def _is_file(values: Mapping[str, Any]) -> bool:
    """Return whether the labels go to a file, or to standard output."""
    return not values["use_node_feature_api"] and not values["node_labels"]


def _publishers(
    values: Mapping[str, Any], connected: Callable[[], Client] | None
) -> Sequence[Publisher]:
    """Return where the labels are published: in the API server, or in a file."""
    from gpunode.services.label_file import LabelFile  # noqa: PLC0415

    if _is_file(values):
        return [LabelFile(values["output_file"])]
    is_feature, is_node = values["use_node_feature_api"], values["node_labels"]
    name = values["node_name"]
    if not name:
        raise ArgumentError(
            "the name of the node is empty", "set NODE_NAME from spec.nodeName of the pod"
        )
    from gpunode.api.client import connect  # noqa: PLC0415
    from gpunode.api.node_labels import NodeFeature, NodeLabels  # noqa: PLC0415

    client = connected() if connected is not None else connect(values["kubeconfig"])
    publishers: list[Publisher] = []
    if is_feature:
        publishers.append(NodeFeature(client, name, values["namespace"] or client.namespace))
    if is_node:
        publishers.append(NodeLabels(client, name))
    return publishers
