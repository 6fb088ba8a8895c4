# SPDX-License-Identifier: Apache-2.0
"""A click group that takes its commands from a table, and imports one only when it runs."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from gpuruntime.cli import completion

EPILOG = '"gpuruntime --help" lists the environment variables that apply to every command.'


class LazyGroup(click.Group):
    """A group of the commands in *table*: name → (module, attribute, summary).

    *sections* orders the names under headings of `--help`; without it there is one heading.
    *variables* are environment variables that `--help` lists: names → effect. *pointer* is the
    last line in the help of each command.
    """

    def __init__(
        self,
        table: dict[str, tuple[str, str, str]],
        sections: dict[str, tuple[str, ...]] | None = None,
        variables: Mapping[str, str] | None = None,
        pointer: str = EPILOG,
        **attributes: Any,  # noqa: ANN401 (click's)
    ) -> None:
        super().__init__(**attributes)
        self.table = table
        self.pointer = pointer
        self.sections = sections or {"Commands": tuple(sorted(table))}
        equip(self, variables)

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
        equip(command, pointer=self.pointer)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's summaries; `--help` imports no command."""
        del ctx
        for heading, names in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.table[name][2]) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names of the table and the options; no command is imported."""
        names = [
            CompletionItem(name, help=self.table[name][2])
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401 (click's)
    ) -> click.Context:
        """Read the options of the group; a usage error names the origin of an invalid value."""
        with _origins():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 (click's)
        """Run the command; a usage error names the origin of an invalid value."""
        with _origins():
            return super().invoke(ctx)


def equip(
    command: click.Command, others: Mapping[str, str] | None = None, pointer: str = EPILOG
) -> None:
    """Add the list of environment variables in `--help` and completions to *command*.

    The same is done for its subcommands. *others* are variables that set no option: name → effect.
    *pointer* is the last line, unless there are such variables.
    The help of an option does not name its variables, because click would wrap long names.
    """
    completion.attach(command)
    rows = [
        (name, next((opt for opt in parameter.opts if opt.startswith("--")), ""))
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in variables_of(parameter)
    ]
    rows += (others or {}).items()
    if isinstance(command, click.Group):
        for child in getattr(command, "commands", {}).values():
            equip(child, pointer=pointer)
    if command.epilog is None:
        last = "" if others else pointer
        command.epilog = "\n\n".join(filter(None, (_as_table(rows), last)))


def variables_of(parameter: click.Parameter) -> list[str]:
    """Return the environment variables that set *parameter*."""
    names = parameter.envvar or ()
    return [names] if isinstance(names, str) else list(names)


def _as_table(rows: list[tuple[str, str]]) -> str:
    """Return *rows* as two columns below a heading, in lines that click does not wrap."""
    if not rows:
        return ""
    width = max(len(name) for name, _ in rows)
    lines = (f"  {name:<{width}}  {text}" for name, text in rows)
    return "\n".join(("\b", "Environment:", *lines))


@contextlib.contextmanager
def _origins() -> Iterator[None]:
    """Add to a usage error the environment variable that has set the invalid value."""
    try:
        yield
    except click.BadParameter as error:
        parameter, context = error.param, error.ctx
        if parameter is not None and context is not None and error.param_hint is None:
            error.param_hint = click.Parameter.get_error_hint(parameter, context)
            source = context.get_parameter_source(parameter.name or "")
            if source is ParameterSource.ENVIRONMENT:
                error.param_hint += f" from the environment variable {_variable(parameter)}"
        raise


def _variable(parameter: click.Parameter) -> str:
    """Return the name of the variable that sets *parameter*: the first that is not empty."""
    return next((name for name in variables_of(parameter) if os.environ.get(name)), "")
