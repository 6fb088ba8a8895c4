# SPDX-License-Identifier: Apache-2.0
"""The root of the command line: a table of lazy commands; errors to exit codes."""

from __future__ import annotations

import importlib
import sys

import click

from gpuruntime import __version__
from gpuruntime.errors import GpuRuntimeError

# Command → (module with a click command of that name, summary). `--help` imports none of them.
COMMANDS = {
    "cdi": ("gpuruntime.cli.cdi", "Generate Container Device Interface specs."),
    "config": ("gpuruntime.cli.config", "Compile config.toml for the start path."),
}


class LazyGroup(click.Group):
    """A group that knows its commands from a table and imports one only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the table."""
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command *cmd_name*."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's summaries."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, row[1]) for name, row in sorted(COMMANDS.items())])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpuruntime")
def root() -> None:
    """Put GPUs into containers."""


def main() -> None:
    """Run the command line; a GpuRuntimeError becomes two lines and its exit code."""
    try:
        root(prog_name="gpuruntime")
    except GpuRuntimeError as error:
        print(f"error: {error.lines()}", file=sys.stderr)  # noqa: T201 (talk goes to stderr)
        sys.exit(error.exit_code)
