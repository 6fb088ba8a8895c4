# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime driver`: the group of commands that show the installed driver."""

from __future__ import annotations

import click

from gpuruntime.cli.lazy import LazyGroup

# Command → (module, command in it, summary).
COMMANDS = {
    "list": (
        "gpuruntime.cli.driver_list",
        "list_",
        "List the driver's files, and what each is for.",
    ),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def driver() -> None:
    """Show the installed driver."""
