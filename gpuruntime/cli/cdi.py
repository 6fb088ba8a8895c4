# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi`: the group of commands that work with CDI specs."""

from __future__ import annotations

import click

from gpuruntime.cli.lazy import LazyGroup

# Command → (module, command in it, summary).
COMMANDS = {
    "diff": ("gpuruntime.cli.cdi_diff", "diff", "Show the differences between two specs."),
    "generate": ("gpuruntime.cli.cdi_generate", "generate", "Write a spec of this host's GPUs."),
    "inject": ("gpuruntime.cli.cdi_inject", "inject", "Add CDI devices to an OCI config."),
    "list": ("gpuruntime.cli.cdi_list", "list_", "List the devices that specs define."),
    "refresh": (
        "gpuruntime.cli.cdi_refresh",
        "refresh",
        "Rewrite the spec if the host has changed.",
    ),
    "transform": ("gpuruntime.cli.cdi_transform", "transform", "Replace path prefixes in a spec."),
    "validate": (
        "gpuruntime.cli.cdi_validate",
        "validate",
        "Check specs, and list every problem.",
    ),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def cdi() -> None:
    """Generate, check and apply specs of the Container Device Interface (CDI)."""
