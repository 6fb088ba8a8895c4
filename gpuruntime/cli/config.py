# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime config`: show, change, check config.toml, and compile it for the start path."""

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
from gpuruntime.configfile.option_table import Value
from gpuruntime.errors import ArgumentError, ConfigError, escape
from gpuruntime.launcher import companion

USER = "nvidia-container-cli.user"


class Group(click.Group):
    """A group whose commands may have other names too."""

    aliases: Mapping[str, str] = {"create-default": "default", "generate-default": "default"}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command called *cmd_name* or that this is another name of."""
        return super().get_command(ctx, self.aliases.get(cmd_name, cmd_name))


def _options(*chosen: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options named, by the names of their parameters."""
    known = {
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
            help="Change this option; repeatable.",
        ),
        "separator": click.option("--set-list-separator", "separator", default=":", hidden=True),
        "in_place": click.option(
            "--in-place", "-i", is_flag=True, help="Write the result back to the file."
        ),
        "output": click.option(
            "--output", "-o", default="", metavar="FILE", help="Write the result to this file."
        ),
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for name in reversed(chosen):
            function = known[name](function)
        return function

    return decorate


_EDITING = ("config_file", "sets", "separator", "in_place", "output")


@click.group(cls=Group, invoke_without_command=True)
@_options(*_EDITING)
@click.pass_context
def config(ctx: click.Context, /, config_file: str | None, **given: Any) -> None:  # noqa: ANN401 (click's)
    """Show, change and check config.toml.

    Without a command, print the file, with the changes of --set.

    The file in force is the first that exists: $GPURUNTIME_CONFIG, $NVIDIA_CTK_CONFIG_FILE_PATH,
    gpuruntime/config.toml or nvidia-container-runtime/config.toml in $XDG_CONFIG_HOME, the same
    two in /etc.
    """
    ctx.obj = config_file or ctx.obj
    if ctx.invoked_subcommand is None:
        _edit(ctx.obj, **given)
    elif given["sets"] or given["in_place"] or given["output"]:
        raise click.UsageError(f'give these options after "{ctx.invoked_subcommand}"')


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
    **given: Any,  # noqa: ANN401 (click's)
) -> None:
    """Change options in the config file.

    Print the changed file, or write it back with --in-place. Items of a list are separated by ":",
    or by "," if there is no ":". A boolean without a value is true. The value "nil" removes a
    feature from the file. Comments and unknown keys are kept.
    """
    if not (pairs or sets):
        raise click.UsageError("nothing to set: give KEY=VALUE")
    _edit(config_file or outer, sets=(*sets, *pairs), **given)
    if not (given["in_place"] or given["output"]):
        click.echo('note: the file is as before; "--in-place" changes it', err=True)


@config.command("default")
@_options("output")
def default_command(output: str) -> None:
    """Print a config file with all options and defaults."""
    _emit(option_table.example(_host_values()), output)


@config.command("show")
@_options("config_file")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show_command(outer: str | None, config_file: str | None, *, as_json: bool) -> None:
    """Print every option, its value and its origin."""
    path, text = _load(config_file or outer)
    values, warnings = ({}, []) if text is None else accepted(path, text)
    for warning in warnings:
        click.echo(f"warning: {escape(warning)}", err=True)
    if as_json:
        shown = {
            key: {
                "value": values.get(key, default),
                "from": "file" if key in values else "default",
            }
            for key, default in settings.DEFAULTS.items()
        }
        file = None if text is None else path
        write_stdout(json.dumps({"file": file, "values": shown}, indent=2) + "\n")
        return
    rows = [f"# {'no config file' if text is None else escape(path)}"]
    for key, default in settings.DEFAULTS.items():
        value = values.get(key, default)
        source = "file" if key in values else "default"
        row = f"# {key}: not set" if value is None else f"{key} = {option_table.literal(value)}"
        rows.append(f"{row}  # {source}")
    write_stdout("\n".join(rows) + "\n")


@config.command("check")
@_options("config_file")
@click.pass_context
def check_command(ctx: click.Context, config_file: str | None) -> None:
    """List every problem of the config file, with its line.

    An error keeps containers from starting, a warning does not. The exit status is 1 if there is
    either. A note is about an option that has no effect yet.
    """
    chosen = config_file or ctx.obj
    path, text = _load(chosen)
    if text is None:
        if chosen:
            raise ConfigError(f'there is no file "{path}"', "name a file that exists")
        click.echo("no config file: the defaults are in force", err=True)
        return
    findings = examine(files.parse(text, path))[1]
    places = config_lines.lines(text)
    rows = [(config_lines.line_of(finding.path, places) or 1, finding) for finding in findings]
    rows.sort(key=lambda row: row[0])
    write_stdout(
        "".join(
            f"{escape(path)}:{line}: {found.severity}: {escape(sentence(found))}\n"
            for line, found in rows
        )
    )
    bad = sum(finding.severity != NOTE for finding in findings)
    click.echo(f"{bad} problem{'' if bad == 1 else 's'}", err=True)
    if bad:
        ctx.exit(1)


@config.command("compile")
@_options("config_file")
@click.pass_obj
def compile_command(outer: str | None, config_file: str | None) -> None:
    """Compile the config file for the start path."""
    path = config_file or outer
    if path is None:
        found = settings.find(os.environ)
        if found is None:
            companion.keep(os.environ)
            click.echo("no config file: the defaults are in force", err=True)
            return
        path = found[0]
    _, warnings = compile_file(path)
    for warning in warnings:
        click.echo(f"warning: {escape(warning)}", err=True)
    click.echo(f'compiled "{escape(path)}"', err=True)


def _load(chosen: str | None) -> tuple[str, str | None]:
    """Return the path of the file *chosen*, or in force, and its text, None if there is none."""
    path = chosen
    if path is None:
        found = settings.find(os.environ)
        path = settings.search_path(os.environ)[0] if found is None else found[0]
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path, None
    except (OSError, ValueError):
        # Reading it says why not.
        pass
    return path, files.read(path)[0]


def _edit(
    chosen: str | None, *, sets: tuple[str, ...], separator: str, in_place: bool, output: str
) -> None:
    """Print the config file with *sets* made, or write it where that is wanted."""
    if in_place and output:
        raise click.UsageError("--in-place and --output exclude each other")
    path, text = _load(chosen)
    if text is None:
        text = option_table.example(_host_values())
    else:
        files.parse(text, path)
    keys = set()
    for argument in sets:
        option, value = edit.parse(argument, separator)
        text = edit.apply(text, option, value)
        keys.add(option.key)
    # Faults of other options were in the file before; they do not prevent this change.
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
    """Write *text* to the file *output*, to standard output if that is "" or "-"."""
    if output in ("", "-"):
        write_stdout(text)
        return
    changed = files.replace(output, text)
    click.echo(f'{"wrote" if changed else "unchanged"} "{escape(output)}"', err=True)


def _host_values() -> dict[str, Value]:
    """Return the values that a new file has on this host in place of the defaults."""
    values: dict[str, Value] = {}
    # On Debian and its kin, ldconfig is a script around this one.
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
            # The device nodes are for this group there.
            values[USER] = "root:video"
    return values
