# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime runtime`: the group of commands for container engines."""

from __future__ import annotations

import click

from gpuruntime.cli.lazy import LazyGroup

COMMANDS = {
    "configure": (
        "gpuruntime.cli.runtime_configure",
        "configure",
        "Register the runtime with an engine, or undo that.",
    ),
    "list": (
        "gpuruntime.cli.runtime_list",
        "list_",
        "List the engines' config files that name the runtime.",
    ),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def runtime() -> None:
    """Register the runtime with container engines."""
