# SPDX-License-Identifier: Apache-2.0
"""A click group that takes its commands from a table, and imports one only when it runs."""

from __future__ import annotations

import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """A group of the commands in *table*: name → (module, attribute, summary).

    *sections* orders the names under headings of `--help`; without it there is one heading.
    """

    def __init__(
        self,
        table: dict[str, tuple[str, str, str]],
        sections: dict[str, tuple[str, ...]] | None = None,
        **attributes: Any,  # noqa: ANN401 (click's)
    ) -> None:
        super().__init__(**attributes)
        self.table = table
        self.sections = sections or {"Commands": tuple(sorted(table))}
        show_variables(self)

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
        show_variables(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's summaries; `--help` imports no command."""
        del ctx
        for heading, names in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.table[name][2]) for name in names])


def show_variables(command: click.Command) -> None:
    """Have `--help` of *command* name the environment variables that set its options."""
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            parameter.show_envvar = True
