# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime runtime list`: list the engines' config files that name our runtime."""

from __future__ import annotations

import os

import click

from gpuruntime.cli.output import write_stdout
from gpuruntime.cli.runtime_configure import PROGRAM, installed
from gpuruntime.engines import config_paths, references, undo_records
from gpuruntime.errors import escape


@click.command("list")
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="FILE",
    help="The runtime's program; may be repeated.  [default: the installed one]",
)
@click.option(
    "--state-dir",
    envvar="GPURUNTIME_STATE_DIRECTORY",
    metavar="DIRECTORY",
    help="Where the undo records are.",
)
def list_(programs: tuple[str, ...], state_dir: str | None) -> None:
    """List the engines' config files that name the runtime's program.

    Each line has a file, the runtime's name in it, and the command that removes it from the file.
    Run these commands before you remove the program: an engine cannot start containers with a
    runtime that does not exist.
    """
    state = state_dir or undo_records.default_directory(dict(os.environ), os.geteuid())
    programs = programs or (installed(PROGRAM),)
    for path, name, command in references.find(programs, config_paths.this_host(), state):
        write_stdout(f'"{escape(path)}" has the runtime "{escape(name)}"; undo: {command}\n')
