# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime config`: show, change and check config.toml, and compile it for the start path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import click

from gpuruntime import config as settings
from gpuruntime.cli.output import write_stdout
from gpuruntime.configfile import edit, option_table
from gpuruntime.configfile import file as files
from gpuruntime.configfile import lines as config_lines
from gpuruntime.configfile.check import LDCONFIG, LDCONFIG_FEATURE, NOTE, examine, sentence
from gpuruntime.configfile.compilation import accepted, compile_file
from gpuruntime.configfile.option_table import Option, Value
from gpuruntime.errors import ArgumentError, ConfigError, escape
from gpuruntime.launcher import companion

USER = "nvidia-container-cli.user"


class Group(click.Group):
    """A group whose commands can have several names."""

    aliases: Mapping[str, str] = {"create-default": "default", "generate-default": "default"}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command *cmd_name*, which may be an alias."""
        return super().get_command(ctx, self.aliases.get(cmd_name, cmd_name))


def _options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options whose parameters have *names*."""
    decorators = {
        "config_file": click.option(
            "--config-file",
            "--config",
            "-c",
            "config_file",
            metavar="FILE",
            help="Config file.  [default: the one in force]",
        ),
        "sets": click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="KEY[=VALUE]",
            help="Set an option of the file; repeatable.",
        ),
        "separator": click.option("--set-list-separator", "separator", default=":", hidden=True),
        "in_place": click.option(
            "--in-place", "-i", is_flag=True, help="Write the result to the config file."
        ),
        "output": click.option(
            "--output", "-o", default="", metavar="FILE", help="Write the result to FILE."
        ),
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for name in reversed(names):
            function = decorators[name](function)
        return function

    return decorate


_EDITING = ("config_file", "sets", "separator", "in_place", "output")


@click.group(cls=Group, invoke_without_command=True)
@_options(*_EDITING)
@click.pass_context
def config(ctx: click.Context, /, config_file: str | None, **editing: Any) -> None:  # noqa: ANN401 (click's)
    """Show, change and check config.toml.

    Without a command, print the file in force with the changes of --set, or the defaults if there
    is no file.

    The file in force is the first that exists: $GPURUNTIME_CONFIG, $NVIDIA_CTK_CONFIG_FILE_PATH,
    gpuruntime/config.toml or nvidia-container-runtime/config.toml in $XDG_CONFIG_HOME, and these
    two in /etc.
    """
    ctx.obj = config_file or ctx.obj
    if ctx.invoked_subcommand is None:
        _edit(ctx.obj, **editing)
    elif editing["sets"] or editing["in_place"] or editing["output"]:
        raise click.UsageError(f'write these options after "{ctx.invoked_subcommand}"')


@config.command("set")
@_options(*_EDITING)
@click.argument("pairs", nargs=-1, metavar="KEY[=VALUE]...")
@click.pass_obj
def set_command(
    outer: str | None,
    /,
    config_file: str | None,
    pairs: tuple[str, ...],
    sets: tuple[str, ...],
    **editing: Any,  # noqa: ANN401 (click's)
) -> None:
    """Set options of the config file.

    Print the changed file, or write it with --in-place. Items of a list are separated by ":", or
    by "," if the value has no ":". A boolean without a value is true. The value "nil" removes a
    feature from the file. Comments and unknown keys are kept.

    A value that a container would not get is refused with exit status 2, and nothing is changed.
    """
    if not (pairs or sets):
        raise click.UsageError("nothing to set: give KEY=VALUE")
    _edit(config_file or outer, sets=(*sets, *pairs), **editing)
    if not (editing["in_place"] or editing["output"]):
        click.echo('note: the file is not changed without "--in-place"', err=True)


@config.command("default")
@_options("output")
def default_command(output: str) -> None:
    """Print a config file with all options and their defaults."""
    _emit(option_table.example(_host_values()), output)


@config.command("show")
@_options("config_file")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show_command(outer: str | None, config_file: str | None, *, as_json: bool) -> None:
    """Print every option with its value and its origin."""
    path, text = _load(config_file or outer)
    values, warnings = ({}, []) if text is None else accepted(path, text)
    for warning in warnings:
        click.echo(f"warning: {escape(warning)}", err=True)
    if as_json:
        options = {option.key: _as_json(option, values) for option in option_table.OPTIONS}
        file = None if text is None else path
        write_stdout(json.dumps({"file": file, "values": options}, indent=2) + "\n")
        return
    lines = [f"# {'no config file' if text is None else escape(path)}"]
    lines += [_as_line(option, values) for option in option_table.OPTIONS]
    write_stdout("\n".join(lines) + "\n")


def _as_json(option: Option, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the value of *option* and its origin; if it has no effect, also the reason."""
    reason: dict[str, Value] = {"no_effect": option.never} if option.never else {}
    return {
        "value": values.get(option.key, option.default),
        "from": "file" if option.key in values else "default",
        **reason,
    }


def _as_line(option: Option, values: Mapping[str, Value]) -> str:
    """Return the value of *option* as a line of TOML, with its origin in a comment."""
    value = values.get(option.key, option.default)
    setting = f"{option.key} = {option_table.literal(value)}"
    if value is None:
        setting = f"# {option.key}: not set"
    origin = "file" if option.key in values else "default"
    reason = f"; no effect: {option.never}" if option.never else ""
    return f"{setting}  # {origin}{reason}"


@config.command("check")
@_options("config_file")
@click.pass_context
def check_command(ctx: click.Context, config_file: str | None) -> None:
    """List every fault of the config file, with its line.

    With an error, containers fail: all of them, or those that request a GPU. With a warning, they
    start, but a value is not used as it is written. A note is about a value that has no effect.
    The exit status is 1 if there is an error or a warning.
    """
    requested_path = config_file or ctx.obj
    path, text = _load(requested_path)
    if text is None:
        if requested_path:
            raise ConfigError(f'the file "{path}" does not exist', "name a file that exists")
        click.echo("no config file: the defaults are in force", err=True)
        return
    findings = examine(files.parse(text, path))[1]
    line_numbers = config_lines.lines(text)
    rows = [
        (config_lines.line_of(finding.path, line_numbers) or 1, finding) for finding in findings
    ]
    rows.sort(key=lambda row: row[0])
    write_stdout(
        "".join(
            f"{escape(path)}:{line}: {finding.severity}: {escape(sentence(finding))}\n"
            for line, finding in rows
        )
    )
    count = sum(finding.severity != NOTE for finding in findings)
    click.echo(f"{count} problem{'' if count == 1 else 's'}", err=True)
    if count:
        ctx.exit(1)


@config.command("compile")
@_options("config_file")
@click.pass_obj
def compile_command(outer: str | None, config_file: str | None) -> None:
    """Compile the config file for the start path."""
    path = config_file or outer
    if path is None:
        file = settings.find(os.environ)
        if file is None:
            companion.keep(os.environ)
            click.echo("no config file: the defaults are in force", err=True)
            return
        path = file[0]
    _, warnings = compile_file(path)
    for warning in warnings:
        click.echo(f"warning: {escape(warning)}", err=True)
    click.echo(f'compiled "{escape(path)}"', err=True)


def _load(path: str | None) -> tuple[str, str | None]:
    """Return *path*, or the path of the file in force, and its text, None if it does not exist."""
    if path is None:
        file = settings.find(os.environ)
        path = settings.search_path(os.environ)[0] if file is None else file[0]
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path, None
    except (OSError, ValueError):
        # Reading the file fails too, with an error that has the reason.
        pass
    return path, files.read(path)[0]


def _edit(
    path: str | None, *, sets: tuple[str, ...], separator: str, in_place: bool, output: str
) -> None:
    """Print the config file *path* with the changes *sets*, or write it.

    Raises ArgumentError for a change that is refused, and ConfigError.
    """
    if in_place and output:
        raise click.UsageError("--in-place and --output exclude each other")
    path, text = _load(path)
    if text is None:
        text = option_table.example(_host_values())
    else:
        files.parse(text, path)
    keys = set()
    for argument in sets:
        option, value = edit.parse(argument, separator)
        text = edit.apply(text, option, value)
        keys.add(option.key)
    # Faults of other options were already in the file, and do not prevent this change.
    if LDCONFIG_FEATURE in keys:
        keys.add(LDCONFIG)
    findings = [
        finding
        for finding in examine(files.parse(text, path))[1]
        if ".".join(finding.path) in keys
    ]
    for finding in findings:
        if finding.severity != NOTE:
            raise ArgumentError(finding.message, finding.hint)
    for finding in findings:
        click.echo(f"{finding.severity}: {escape(sentence(finding))}", err=True)
    _emit(text, path if in_place else output)


def _emit(text: str, output: str) -> None:
    """Write *text* to the file *output*, or to standard output if *output* is "" or "-"."""
    if output in ("", "-"):
        write_stdout(text)
        return
    changed = files.replace(output, text)
    click.echo(f'{"wrote" if changed else "unchanged"} "{escape(output)}"', err=True)


def _host_values() -> dict[str, Value]:
    """Return the values that replace the defaults in a new file on this host."""
    values: dict[str, Value] = {}
    # On Debian and its derivatives, ldconfig is a script that calls this program.
    if os.path.exists("/sbin/ldconfig.real"):
        values[LDCONFIG] = "@/sbin/ldconfig.real"
    try:
        with open("/etc/os-release", encoding="utf-8", errors="replace") as stream:
            lines = stream.read(1 << 16).splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, like = line.partition("=")
        if name == "ID_LIKE" and {"suse", "opensuse"} & set(like.strip("\"'").split()):
            # On SUSE's distributions, the device nodes belong to this group.
            values[USER] = "root:video"
    return values
