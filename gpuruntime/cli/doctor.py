# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime doctor`: report what is wrong with this host and how to cure it; changes nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

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
    help="Run only this check; repeatable.  [default: all]",
)
@click.option(
    "--root",
    default="/",
    metavar="DIR",
    help="Check the host whose root directory is DIR, a tree of files.  [default: /]",
)
@click.option(
    "--timeout",
    "deadline_s",
    type=click.FloatRange(min=0.1, max=600),
    default=DEADLINE_S,
    envvar="GPURUNTIME_DOCTOR_TIMEOUT",
    show_default=True,
    metavar="SECONDS",
    help="Time limit of each check; a check that exceeds it has failed.",
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
    """Check this host: one line per check with ok, warn or fail, and one action.

    The exit status is 0 if every check is ok, 1 if there are warnings, 2 if a check failed:
    containers cannot use GPUs until that is cured. Nothing is changed, started or stopped. Root
    sees more than other users.
    """
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ArgumentError(f'unknown check "{unknown[0]}"', f"name one of {', '.join(CHECKS)}")
    chosen = {name: check for name, check in CHECKS.items() if not names or name in names}
    # The environment of this shell does not apply to another host.
    machine = ExaminedMachine(root, os.environ if os.path.realpath(root) == "/" else {})
    findings = run.run(chosen, machine, deadline_s)
    if as_json:
        text = json.dumps([dataclasses.asdict(item) for item in findings], indent=2)
    else:
        color = _may_use_color()
        lines = [item.line(color=color) for item in finding.by_severity(findings)]
        text = "\n".join([*lines, finding.summary(findings)])
    write_stdout(f"{text}\n")
    if os.geteuid() != 0 and machine.is_live:
        click.echo("note: run as root to check everything", err=True)
    ctx.exit(finding.exit_status(findings))


def _may_use_color() -> bool:
    """Return whether standard output is a terminal that shows colors, and the user wants them."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return not is_plain and sys.stdout.isatty()
