# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi`: the group of commands that work with CDI specs."""

from __future__ import annotations

import click

from gpuruntime.cli.lazy import LazyGroup

# Command → (module, command in it, summary).
COMMANDS = {
    "diff": ("gpuruntime.cli.cdi_diff", "diff", "Show what differs between two specs."),
    "generate": ("gpuruntime.cli.cdi_generate", "generate", "Write a spec of the GPUs here."),
    "inject": ("gpuruntime.cli.cdi_inject", "inject", "Add devices to an OCI config."),
    "list": ("gpuruntime.cli.cdi_list", "list_", "List the devices that specs define."),
    "refresh": ("gpuruntime.cli.cdi_refresh", "refresh", "Write the spec again if need be."),
    "transform": ("gpuruntime.cli.cdi_transform", "transform", "Rewrite the paths of a spec."),
    "validate": ("gpuruntime.cli.cdi_validate", "validate", "Check specs, naming every problem."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def cdi() -> None:
    """Work with Container Device Interface specs."""
