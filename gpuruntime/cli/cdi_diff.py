# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi diff`: print the differences between two CDI specs."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from cdi import diff as differences
from gpuruntime.cli import spec_files
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import GpuRuntimeError, SpecError, escape

# The exit statuses of diff(1); 1 is not an error.
DIFFERENT, TROUBLE = 1, 2


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
def diff(old: str, new: str, *, as_json: bool) -> None:
    """Show what differs between two CDI specs, one line each; "-" is standard input.

    What a spec asks for is compared, not how it is written: JSON or YAML, the order of members and
    of devices do not count. The order of env, hooks and mounts does. A line begins with "+" for
    what only NEW has, "-" for what only OLD has, and "~" for what both have in different ways.

    The exit status is 0 if the specs are equal, 1 if they differ, and 2 in case of trouble.
    """
    try:
        if old == new == "-":
            raise SpecError("standard input is one spec, not two", "name a file for the other")
        changes = differences.compare(spec_files.load(old), spec_files.load(new))
        if as_json:
            result = {"equal": not changes, "changes": [asdict(change) for change in changes]}
            write_stdout(json.dumps(result, indent=2) + "\n")
        else:
            lines = [f"{escape(change.line())}\n" for change in changes]
            write_stdout("".join(lines))
    except GpuRuntimeError as error:
        error.exit_code = TROUBLE
        raise
    if changes:
        click.get_current_context().exit(DIFFERENT)
