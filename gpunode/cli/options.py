# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gpunode import service_log

# What adds an option to a command.
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

MIG_STATE_DIRECTORY = "/run/gpu-node/mig"

kubeconfig = click.option(
    "--kubeconfig",
    default="",
    envvar="KUBECONFIG",
    metavar="FILE",
    help="File that names the API server.  [default: the cluster of the pod]",
)
node_name = click.option(
    "--node-name", default="", envvar="NODE_NAME", metavar="NAME", help="Name of this node."
)
healthz = click.option(
    "--healthz",
    default="",
    envvar="HEALTHZ",
    metavar="ADDRESS",
    help="HOST:PORT of the probes /livez, /readyz and /healthz.  [default: none]",
)
log_format = click.option(
    "--log-format",
    type=click.Choice(service_log.FORMATS),
    default=service_log.TEXT,
    envvar="LOG_FORMAT",
    help="Form of the log lines on standard error.  [default: text]",
)


def boolean(option: str, *names: str, variable: str, default: bool, text: str) -> Decorator:
    """Return an option that takes true and false, and is true without a value."""
    return click.option(
        option,
        *names,
        type=bool,
        is_flag=False,
        flag_value="true",
        default=default,
        envvar=variable,
        metavar="BOOLEAN",
        help=f"{text}  [default: {str(default).lower()}]",
    )


def together(*options: Decorator) -> Decorator:
    """Return what adds all *options*, in their order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# How NVML is called to change MIG, and where the lock and the journal of a change are.
mig_host = together(
    click.option(
        "--nvidia-driver-root",
        "driver_root",
        default="/",
        envvar=["CONTAINER_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH", "NVIDIA_DRIVER_ROOT"],
        metavar="PATH",
        help="Directory below which the driver is installed.  [default: /]",
    ),
    click.option(
        "--state-directory",
        default=MIG_STATE_DIRECTORY,
        envvar="GPU_NODE_MIG_STATE_DIRECTORY",
        metavar="PATH",
        help=f"Directory of the lock and the journal.  [default: {MIG_STATE_DIRECTORY}]",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0.1),
        default=60.0,
        metavar="SECONDS",
        help="How long one call of NVML may take.  [default: 60]",
    ),
)
