# SPDX-License-Identifier: Apache-2.0
"""The root of the command line: the table of commands, and errors turned into exit codes."""

from __future__ import annotations

import contextlib
import os
import re
import sys

import click

from gpuruntime import __version__
from gpuruntime.cli.lazy import LazyGroup
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import ArgumentError, GpuRuntimeError

# Command → (module, command in it, summary).
COMMANDS = {
    "cdi": ("gpuruntime.cli.cdi", "cdi", "Generate, check and apply CDI specs."),
    "driver": ("gpuruntime.cli.driver", "driver", "List the files of the installed driver."),
    "doctor": ("gpuruntime.cli.doctor", "doctor", "Check this host, and name the problems."),
    "explain": ("gpuruntime.cli.explain", "explain", "Show what a container would get, and why."),
    "info": ("gpuruntime.cli.info", "info", "Print what a bug report needs."),
    "runtime": ("gpuruntime.cli.runtime", "runtime", "Register the runtime with an engine."),
    "hook": ("gpuruntime.cli.hook", "hook", "Run a hook of CDI specs."),
    "system": ("gpuruntime.cli.system", "system", "Create device nodes and their symlinks."),
    "config": ("gpuruntime.cli.config", "config", "Show, change and check config.toml."),
}
# Headings of `--help`: purposes, and the commands for each.
SECTIONS = {
    "Set up a node": ("runtime", "config", "system"),
    "Find out what a container gets, or what is wrong": ("explain", "doctor", "info", "driver"),
    "Work with CDI specs": ("cdi", "hook"),
}


# Environment variables that set no option.
VARIABLES = {
    "GPURUNTIME_CONFIG": "config file, if it exists",
    "NVIDIA_CTK_CONFIG_FILE_PATH": "config file, if the former names none",
    "XDG_CONFIG_HOME": "has gpuruntime/config.toml, before /etc",
    "XDG_DATA_DIRS": "directories of the driver's data files",
    "PATH": "programs of engines and of the host",
}
# The incumbent's tool: under this name, options may have one dash.
INCUMBENT = "nvidia-ctk"
# The completion scripts set this variable, whatever the name of the program.
COMPLETE_VARIABLE = "_GPURUNTIME_COMPLETE"
# Switches that may have a value, such as `--debug=true`, with the incumbent's programs.
_SWITCHES = frozenset(
    {
        *("--debug", "--quiet", "--in-place", "--no-all-device"),
        *("--control-devices", "--create-all", "--create-device-nodes"),
        *("--dry-run", "--load-kernel-modules"),
    }
)
_ONE_DASH = re.compile(r"-[a-z][a-z.-]+(=|$)")
_VALUES = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 (click's)
    """Print the version and end the program, if *value* requests that."""
    del parameter
    if not value or ctx.resilient_parsing:
        return
    # Scripts look for these words in the output of the incumbent's tool.
    words = "NVIDIA Container Toolkit CLI version" if ctx.info_name == INCUMBENT else ""
    write_stdout(f"{words} {__version__}\n" if words else "")
    write_stdout(f"gpuruntime, version {__version__}\n")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    sections=SECTIONS,
    variables=VARIABLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    *("--version", "-v"),
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option(
    *("--quiet", "-q"),
    is_flag=True,
    envvar=["GPURUNTIME_QUIET", "NVIDIA_CTK_QUIET"],
    help="Print errors only.",
)
@click.option(
    *("--debug", "-d"),
    is_flag=True,
    envvar=["GPURUNTIME_DEBUG", "NVIDIA_CTK_DEBUG"],
    help="Print on standard error which files are opened and which programs are started.",
)
@click.option(
    "--config",
    envvar="NVIDIA_CTK_CONFIG",
    metavar="FILE",
    help="Config file for commands that read config.toml.  [default: the one in force]",
)
@click.pass_context
def root(ctx: click.Context, /, *, quiet: bool, debug: bool, config: str | None) -> None:
    """Give GPUs to containers: set up a node, and see what containers get.

    Start with "gpuruntime doctor", then "gpuruntime runtime configure".
    "gpuruntime COMMAND --help" describes a command and the variables that set its options.
    """
    if config:
        if ctx.invoked_subcommand == "config":
            # Its commands can create the file.
            ctx.obj = config
        elif not os.path.exists(config):
            # Otherwise the next file of the search path would be in force.
            raise ArgumentError(
                f'the config file "{config}" does not exist', "name a file that exists"
            )
        os.environ["GPURUNTIME_CONFIG"] = config
    if debug and not quiet:
        from gpuruntime.cli import trace  # noqa: PLC0415 (few commands are traced)

        trace.start(2, sys.argv)
    if quiet:
        # Until the command has ended; errors are printed afterwards.
        null_device = ctx.with_resource(open(os.devnull, "w"))  # noqa: SIM115 (it is a context)
        ctx.with_resource(contextlib.redirect_stderr(null_device))


def main() -> None:
    """Run the command line; print a GpuRuntimeError as two lines, and exit with its code."""
    _occupy_standard_descriptors()
    program = os.path.basename(sys.argv[0])
    if COMPLETE_VARIABLE in os.environ:
        # Messages would appear in the middle of the command line that is completed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        if program == "nvidia-container-cli":
            from gpuruntime.cli import container_cli  # noqa: PLC0415 (a program of its own)

            container_cli.root(prog_name=container_cli.PROGRAM, complete_var=COMPLETE_VARIABLE)
        is_incumbent = program == INCUMBENT
        root(
            _plain(sys.argv[1:], is_incumbent=is_incumbent),
            prog_name=program if is_incumbent else "gpuruntime",
            complete_var=COMPLETE_VARIABLE,
        )
    except GpuRuntimeError as error:
        print(f"error: {error.lines()}", file=sys.stderr)  # noqa: T201 (messages go to stderr)
        sys.exit(error.exit_code)


def _plain(words: list[str], *, is_incumbent: bool) -> list[str]:
    """Return *words* with `--switch=true` replaced by `--switch`, and without false switches.

    With *is_incumbent*, an option with one dash is the same as with two.
    """
    plain = []
    for word in words:
        if is_incumbent and _ONE_DASH.match(word):
            word = f"-{word}"  # noqa: PLW2901 (the same word)
        name, _, value = word.partition("=")
        is_on = _VALUES.get(value.lower()) if name in _SWITCHES else None
        if is_on is None:
            plain.append(word)
        elif is_on:
            plain.append(name)
    return plain


def _occupy_standard_descriptors() -> None:
    """Open the descriptors 0, 1 and 2 if they are closed, so that no later file gets them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The kernel assigns the lowest free number. Read-only, so that printing fails.
            os.open("/dev/null", os.O_RDONLY)
