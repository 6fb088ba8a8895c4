# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime runtime`: the group of commands for container engines."""

from __future__ import annotations

import click

from gpuruntime.cli.lazy import LazyGroup

COMMANDS = {
    "configure": (
        "gpuruntime.cli.runtime_configure",
        "configure",
        "Make an engine know our runtime, or forget it.",
    ),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def runtime() -> None:
    """Work with container engines."""
