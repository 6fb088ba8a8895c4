# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi validate`: check CDI specs and report every problem."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import click

from cdi import store
from cdi import validate as checks
from cdi.errors import CdiError
from cdi.registry import ENDINGS
from cdi.validate import SpecFinding
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import escape


@click.command()
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
def validate(files: tuple[str, ...], *, strict: bool, as_json: bool) -> None:
    """Check CDI specs, naming every problem of each FILE; "-" is standard input.

    An error keeps a spec from loading. A warning does not: the spec is against the prose of the
    format, unsafe, or not understood by every consumer. The exit status is 1 if there is an error
    or, with --strict, a warning.
    """
    found = [(name, finding) for name in files for finding in _findings(name)]
    write_stdout(_to_json(found) if as_json else "".join(_line(*pair) for pair in found))
    errors = sum(finding.severity == "error" for _, finding in found)
    warnings = len(found) - errors
    counts = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}"
    click.echo(f"{_count(len(files), 'file')}: {counts}", err=True)
    if errors or (strict and warnings):
        click.get_current_context().exit(1)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _findings(name: str) -> list[SpecFinding]:
    try:
        text = store.read(0 if name == "-" else name)
    except CdiError as error:
        return [SpecFinding(None, "error", error.category, "", error.message)]
    except OSError as error:
        return [SpecFinding(None, "error", "syntax", "", f"cannot read it: {error.strerror}")]
    found = checks.validate(text, os.stat)
    if name != "-" and not name.endswith(ENDINGS):
        message = f"in a spec directory only files ending in {' or '.join(ENDINGS)} are read"
        found.insert(0, SpecFinding(None, "warning", "file-name", "", message))
    return found


def _line(name: str, finding: SpecFinding) -> str:
    place = [escape(name)] + ([str(finding.line)] if finding.line else [])
    where = f"{finding.where}: " if finding.where else ""
    told = escape(f"{finding.category}: {where}{finding.message}")
    return f"{':'.join(place)}: {finding.severity}: {told}\n"


def _to_json(found: list[tuple[str, SpecFinding]]) -> str:
    return (
        json.dumps([{"file": name, **asdict(finding)} for name, finding in found], indent=2) + "\n"
    )
