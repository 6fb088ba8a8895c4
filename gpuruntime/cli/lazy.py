# SPDX-License-Identifier: Apache-2.0
"""A click group that takes its commands from a table, and imports one only when it runs."""

from __future__ import annotations

import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """A group of the commands in *table*: name → (module, attribute, summary)."""

    def __init__(self, table: dict[str, tuple[str, str, str]], **attributes: Any) -> None:  # noqa: ANN401 (click's)
        super().__init__(**attributes)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the table."""
        del ctx
        return sorted(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command *cmd_name*."""
        del ctx
        if cmd_name not in self.table:
            return None
        module, attribute, _ = self.table[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's summaries; `--help` imports no command."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, row[2]) for name, row in sorted(self.table.items())])
