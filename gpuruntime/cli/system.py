# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime system`: the group of commands for the host's device nodes."""

from __future__ import annotations

import click

from gpuruntime.cli.lazy import LazyGroup

COMMANDS = {
    "create-device-nodes": (
        "gpuruntime.cli.system_nodes",
        "create_device_nodes",
        "Create the driver's device nodes.",
    ),
    "create-dev-char-symlinks": (
        "gpuruntime.cli.system_links",
        "create_dev_char_symlinks",
        "Create the symlinks by which systemd finds device nodes.",
    ),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def system() -> None:
    """Prepare the host: create device nodes and the symlinks to them."""
