# SPDX-License-Identifier: Apache-2.0
"""The root of the command line: a table of lazy commands; errors to exit codes."""

from __future__ import annotations

import os
import sys

import click

from gpuruntime import __version__
from gpuruntime.cli.lazy import LazyGroup
from gpuruntime.errors import GpuRuntimeError

# Command → (module, command in it, summary).
COMMANDS = {
    "cdi": ("gpuruntime.cli.cdi", "cdi", "Work with Container Device Interface specs."),
    "driver": ("gpuruntime.cli.driver", "driver", "Show the driver that is installed here."),
    "doctor": ("gpuruntime.cli.doctor", "doctor", "Say what is wrong with this host."),
    "explain": ("gpuruntime.cli.explain", "explain", "Say what a container would get, and why."),
    "info": ("gpuruntime.cli.info", "info", "Print what a bug report needs."),
    "runtime": ("gpuruntime.cli.runtime", "runtime", "Make container engines know our runtime."),
    "system": ("gpuruntime.cli.system", "system", "Prepare the host: device nodes and links."),
    "config": ("gpuruntime.cli.config", "config", "Show, change, check and compile config.toml."),
}


@click.group(
    cls=LazyGroup, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="gpuruntime")
def root() -> None:
    """Put GPUs into containers."""


def main() -> None:
    """Run the command line; a GpuRuntimeError becomes two lines and its exit code."""
    _occupy_standard_descriptors()
    try:
        if os.path.basename(sys.argv[0]) == "nvidia-container-cli":
            from gpuruntime.cli import container_cli  # noqa: PLC0415 (another program, nearly)

            container_cli.root(prog_name=container_cli.PROGRAM)
        root(prog_name="gpuruntime")
    except GpuRuntimeError as error:
        print(f"error: {error.lines()}", file=sys.stderr)  # noqa: T201 (talk goes to stderr)
        sys.exit(error.exit_code)


def _occupy_standard_descriptors() -> None:
    """Open 0, 1 and 2 if they are closed: a file opened later would be taken for one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number. Not for writing: what is printed is to fail.
            os.open("/dev/null", os.O_RDONLY)
