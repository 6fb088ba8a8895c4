# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi validate`: check CDI specs and report every problem."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import permutations

import click

from cdi import conflicts, store
from cdi import validate as checks
from cdi.errors import CdiError
from cdi.registry import ENDINGS
from cdi.validate import SpecFinding
from gpuruntime.cli import spec_dirs
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import SpecError, escape

# Including files that consumers ignore because of their extension.
_SPECS = (*ENDINGS, ".yml")


@click.command()
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
@click.argument("places", nargs=-1, metavar="[FILE|DIR]...")
def validate(places: tuple[str, ...], *, strict: bool, as_json: bool) -> None:
    """Check CDI specs, naming every problem of each FILE; "-" is standard input.

    Of a DIR the files are checked that consumers read, and without arguments those of the spec
    directories. Files of a spec directory are also compared with those beside them.

    An error keeps a spec, or a device that two files define, from being used. A warning does not:
    the spec is against the prose of the format, unsafe, or not understood by every consumer. The
    exit status is 1 if there is an error or, with --strict, a warning.
    """
    directories, files = _sorted_out(places)
    findings = [(name, finding) for name in files for finding in _findings(name)]
    findings += _conflicts(directories, files)
    write_stdout(_to_json(findings) if as_json else "".join(_line(*pair) for pair in findings))
    errors = sum(finding.severity == "error" for _, finding in findings)
    warnings = len(findings) - errors
    counts = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}"
    click.echo(f"{_count(len(files), 'file')}: {counts}", err=True)
    if errors or (strict and warnings):
        click.get_current_context().exit(1)


def _sorted_out(places: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the directories to look for conflicts in, and the files to check."""
    directories, files = [], []
    for place in places or filter(os.path.isdir, spec_dirs.in_force()):
        if place != "-" and os.path.isdir(place):
            directories.append(place)
            files += _names(place)
            continue
        files.append(place)
        beside = os.path.dirname(os.path.abspath(place))
        if place != "-" and spec_dirs.are_read(beside):
            directories.append(beside)
    return directories, files


def _names(directory: str) -> list[str]:
    """Return the paths of the specs in *directory*; raise SpecError if it cannot be read."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise SpecError(
            f'cannot read "{directory}": {error.strerror}', "name a directory that can be read"
        ) from error
    return [os.path.join(directory, name) for name in names if name.endswith(_SPECS)]


def _conflicts(directories: list[str], files: list[str]) -> list[tuple[str, SpecFinding]]:
    """Return an error for each of *files* that conflicts with another file."""
    by_path = {os.path.abspath(name): name for name in files if name != "-"}
    findings = []
    for conflict in spec_dirs.conflicts_in(directories):
        for path, rival in permutations((conflict.stale, conflict.kept)):
            if path in by_path:
                text = (
                    f'"{rival}" defines {conflicts.some(conflict.names)} too, which resolves '
                    f'nowhere then: remove "{conflict.stale}"'
                )
                findings.append((by_path[path], SpecFinding(None, "error", "conflict", "", text)))
    return findings


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _findings(name: str) -> list[SpecFinding]:
    try:
        text = store.read(0 if name == "-" else name)
    except CdiError as error:
        return [SpecFinding(None, "error", error.category, "", error.message)]
    except OSError as error:
        return [SpecFinding(None, "error", "syntax", "", f"cannot read it: {error.strerror}")]
    findings = checks.validate(text, os.stat)
    if name != "-" and not name.endswith(ENDINGS):
        message = f"in a spec directory only files ending in {' or '.join(ENDINGS)} are read"
        findings.insert(0, SpecFinding(None, "warning", "file-name", "", message))
    return findings


def _line(name: str, finding: SpecFinding) -> str:
    place = [escape(name)] + ([str(finding.line)] if finding.line else [])
    where = f"{finding.where}: " if finding.where else ""
    message = escape(f"{finding.category}: {where}{finding.message}")
    return f"{':'.join(place)}: {finding.severity}: {message}\n"


def _to_json(findings: list[tuple[str, SpecFinding]]) -> str:
    return (
        json.dumps([{"file": name, **asdict(finding)} for name, finding in findings], indent=2)
        + "\n"
    )
