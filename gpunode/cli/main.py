# SPDX-License-Identifier: Apache-2.0
"""The root of gpu-node's command line: the table of commands, errors turned into exit codes."""

from __future__ import annotations

import sys

import click

from gpuruntime import __version__
from gpuruntime.cli.lazy import LazyGroup
from gpuruntime.errors import GpuRuntimeError

PROGRAM = "gpu-node"
COMPLETE_VARIABLE = "_GPU_NODE_COMPLETE"
# Command → (module, command in it, summary).
COMMANDS: dict[str, tuple[str, str, str]] = {
    "agent": (
        *("gpunode.cli.agent", "agent"),
        "Run several services in one program.",
    ),
    "config-manager": (
        *("gpunode.cli.config_manager", "config_manager"),
        "Choose the config of a device plugin by a label of the node.",
    ),
    "device-plugin": (
        *("gpunode.cli.device_plugin", "device_plugin"),
        "Offer the GPUs of this node to the kubelet.",
    ),
    "exporter": (
        *("gpunode.cli.exporter", "exporter"),
        "Serve metrics of the GPUs for Prometheus.",
    ),
    "feature-discovery": (
        *("gpunode.cli.feature_discovery", "feature_discovery"),
        "Publish labels that describe the GPUs of this node.",
    ),
    "mig": (
        *("gpunode.cli.mig", "mig"),
        "Partition GPUs by MIG, as a file of configs describes.",
    ),
    "mig-manager": (
        *("gpunode.cli.mig_manager", "mig_manager"),
        "Partition the GPUs of this node as its label says.",
    ),
    "validate": (
        *("gpunode.cli.validate", "validate"),
        "Report whether this node can run pods with GPUs.",
    ),
    "install": (
        *("gpunode.cli.install", "install"),
        "Install the OCI runtime on a host, and register it with the engine.",
    ),
    "uninstall": (
        *("gpunode.cli.install", "uninstall"),
        "Restore the engine's config, and remove the OCI runtime.",
    ),
    "mps-daemon": (
        *("gpunode.cli.mps_daemon", "mps_daemon"),
        "Run the MPS control daemons of shared GPUs.",
    ),
}


@click.command(cls=LazyGroup, table=COMMANDS, pointer="", epilog="")
@click.version_option(__version__, message="%(prog)s %(version)s")
def root() -> None:
    """Serve the GPUs of a Kubernetes node.

    "gpu-node COMMAND --help" describes a command and the variables that set its options.
    """


def main() -> None:
    """Run the command line; print a GpuRuntimeError as two lines, and exit with its code."""
    try:
        root(prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE)
    except GpuRuntimeError as error:
        print(f"error: {error.lines()}", file=sys.stderr)  # noqa: T201 (messages go to stderr)
        sys.exit(error.exit_code)
