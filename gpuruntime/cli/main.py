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
from gpuruntime.errors import GpuRuntimeError

# Command → (module, command in it, summary).
COMMANDS = {
    "cdi": ("gpuruntime.cli.cdi", "cdi", "Generate, check and apply CDI specs."),
    "driver": ("gpuruntime.cli.driver", "driver", "List the files of the installed driver."),
    "doctor": ("gpuruntime.cli.doctor", "doctor", "Check this host, and name the problems."),
    "explain": ("gpuruntime.cli.explain", "explain", "Show what a container would get, and why."),
    "info": ("gpuruntime.cli.info", "info", "Print what a bug report needs."),
    "runtime": ("gpuruntime.cli.runtime", "runtime", "Register the runtime with an engine."),
    "system": ("gpuruntime.cli.system", "system", "Create device nodes and their symlinks."),
    "config": ("gpuruntime.cli.config", "config", "Show, change and check config.toml."),
}
# Headings of `--help`: what people want to do, and the commands for it.
SECTIONS = {
    "Set up a node": ("runtime", "config", "system"),
    "Find out what a container gets, or what is wrong": ("explain", "doctor", "info", "driver"),
    "Work with CDI specs": ("cdi",),
}


# Switches to which the incumbent's programs take a value as well.
_SWITCHES = frozenset(
    {
        *("--debug", "--quiet", "--in-place", "--no-all-device"),
        *("--control-devices", "--create-all", "--create-device-nodes"),
        *("--dry-run", "--load-kernel-modules"),
    }
)
_ONE_DASH = re.compile(r"-[a-z][a-z.-]+(=|$)")
_VALUES = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="gpuruntime")
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
    help="Accepted for compatibility with nvidia-ctk; has no effect.",
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
    del debug
    if config:
        os.environ["GPURUNTIME_CONFIG"] = config
    if quiet:
        # Until the command has ended: errors are said behind that.
        nothing = ctx.with_resource(open(os.devnull, "w"))  # noqa: SIM115 (it is a context)
        ctx.with_resource(contextlib.redirect_stderr(nothing))


def main() -> None:
    """Run the command line; a GpuRuntimeError becomes two lines and its exit code."""
    _occupy_standard_descriptors()
    program = os.path.basename(sys.argv[0])
    try:
        if program == "nvidia-container-cli":
            from gpuruntime.cli import container_cli  # noqa: PLC0415 (another program, nearly)

            container_cli.root(prog_name=container_cli.PROGRAM)
        root(_plain(sys.argv[1:], is_incumbent=program == "nvidia-ctk"), prog_name="gpuruntime")
    except GpuRuntimeError as error:
        print(f"error: {error.lines()}", file=sys.stderr)  # noqa: T201 (talk goes to stderr)
        sys.exit(error.exit_code)


def _plain(words: list[str], *, is_incumbent: bool) -> list[str]:
    """Return *words* with `--switch=true` as `--switch`, and without those that are false.

    The incumbent's programs take a name behind one dash as behind two.
    """
    found = []
    for word in words:
        if is_incumbent and _ONE_DASH.match(word):
            word = f"-{word}"  # noqa: PLW2901 (the same word)
        name, _, value = word.partition("=")
        is_on = _VALUES.get(value.lower()) if name in _SWITCHES else None
        if is_on is None:
            found.append(word)
        elif is_on:
            found.append(name)
    return found


def _occupy_standard_descriptors() -> None:
    """Open 0, 1 and 2 if they are closed: a file opened later would be taken for one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number. Not for writing: what is printed is to fail.
            os.open("/dev/null", os.O_RDONLY)
