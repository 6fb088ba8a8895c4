# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi list`: print the devices that CDI specs define."""

from __future__ import annotations

import json
from typing import Any

import click

from cdi import conflicts, edits, reasons
from cdi.registry import Registry
from gpuruntime.cli import spec_dirs as directories
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import escape


@click.command("list")
@directories.options
@click.option("--verbose", "-v", is_flag=True, help="Also show the file and edits of each device.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(
    spec_dirs: tuple[str, ...],
    allow_untrusted: bool,  # noqa: FBT001 (click's flags)
    verbose: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """List the devices that can be asked for, one qualified name a line.

    Files that cannot be used, and two files of one directory that define the same names, are
    warned of on standard error.
    """
    known = directories.load(spec_dirs, allow_untrusted=allow_untrusted)
    if as_json:
        write_stdout(json.dumps(as_object(known), indent=2) + "\n")
        return
    for path, errors in known.errors.items():
        for error in errors:
            if error.category != "conflict":
                text = f'"{path}" is not used: {error.category}: {error}'
                click.echo(f"warning: {escape(text)}", err=True)
    for conflict in conflicts.find(known.files, directories.MAINTAINED):
        text = f'{conflict.text()}, which resolve nowhere: remove "{conflict.stale}"'
        click.echo(f"warning: {escape(text)}", err=True)
    names = known.devices
    lines = (line for name in names for line in [name, *(_shown(known, name) if verbose else ())])
    write_stdout("".join(f"{line}\n" for line in lines))
    click.echo(f"found {len(names)} CDI devices", err=True)


def as_object(known: Registry) -> dict[str, Any]:
    """Return what `--json` prints of *known*."""
    return {
        "devices": [_device(known, name) for name in known.devices],
        "unresolved": [
            {"name": name, "reason": reasons.why_unresolved(known, name)}
            for name in known.conflicting
        ],
        "conflicts": [
            {"remove": conflict.stale, "keep": conflict.kept, "names": list(conflict.names)}
            for conflict in conflicts.find(known.files, directories.MAINTAINED)
        ],
        "vendors": known.vendors,
        "classes": known.classes,
        "files": [
            {
                "path": file.path,
                "kind": file.spec["kind"] if file.spec else None,
                "cdiVersion": file.spec["cdiVersion"] if file.spec else None,
                "error": {"category": file.error.category, "message": file.error.message}
                if file.error
                else None,
            }
            for file in known.files
        ],
        "directories": list(known.directories),
    }


def _device(known: Registry, name: str) -> dict[str, Any]:
    *shadowed, file = known.defining(name)
    return {
        "name": name,
        "file": file.path,
        "shadows": [other.path for other in shadowed],
        "edits": edits.describe(known.resolve([name])),
    }


def _shown(known: Registry, name: str) -> list[str]:
    found = _device(known, name)
    lines = [f"file {found['file']}", *(f"in place of {path}" for path in found["shadows"])]
    return [f"  {escape(line)}" for line in [*lines, *found["edits"]]]
