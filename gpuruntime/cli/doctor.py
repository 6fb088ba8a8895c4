# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime doctor`: report what is wrong with this host, and how to fix it; changes nothing."""

from __future__ import annotations

import dataclasses
import json
import os

import click

from gpuruntime.cli.checks import finding, run
from gpuruntime.cli.checks.check_table import CHECKS
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.cli.comma_option import CommaOption
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import ArgumentError

DEADLINE_S = 20.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
@click.option(
    *("--check", "names"),
    cls=CommaOption,
    metavar="NAME",
    help="Only this check; repeatable.  [default: all]",
)
@click.option(
    "--root",
    default="/",
    metavar="DIR",
    help="Look at the host whose root directory this is, a tree of files.  [default: /]",
)
@click.option(
    "--timeout",
    "deadline_s",
    type=click.FloatRange(min=0.1, max=600),
    default=DEADLINE_S,
    envvar="GPURUNTIME_DOCTOR_TIMEOUT",
    show_default=True,
    metavar="SECONDS",
    help="A check that takes longer has failed.",
)
@click.pass_context
def doctor(
    ctx: click.Context,
    *,
    as_json: bool,
    names: tuple[str, ...],
    root: str,
    deadline_s: float,
) -> None:
    """Check this host, one line a check: ok, warn or fail, and what to do.

    The exit status is 0 if all is well, 1 if there are warnings, 2 if something keeps containers
    from their GPUs. Nothing is changed or started. As root, more can be seen.
    """
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ArgumentError(
            f'there is no check "{unknown[0]}"', f"name one of {', '.join(CHECKS)}"
        )
    chosen = {name: check for name, check in CHECKS.items() if not names or name in names}
    # What the variables of a shell say is about this machine, not about a tree.
    machine = ExaminedMachine(root, os.environ if os.path.realpath(root) == "/" else {})
    found = run.run(chosen, machine, deadline_s)
    if as_json:
        write_stdout(json.dumps([dataclasses.asdict(item) for item in found], indent=2) + "\n")
    else:
        write_stdout("".join(f"{item.line()}\n" for item in found))
    if os.geteuid() != 0 and machine.is_live:
        click.echo("note: without root, some of it cannot be seen", err=True)
    ctx.exit(finding.exit_status(found))
