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
    registry = directories.load(spec_dirs, allow_untrusted=allow_untrusted)
    if as_json:
        write_stdout(json.dumps(as_object(registry), indent=2) + "\n")
        return
    for path, errors in registry.errors.items():
        for error in errors:
            if error.category != "conflict":
                text = f'"{path}" is not used: {error.category}: {error}'
                click.echo(f"warning: {escape(text)}", err=True)
    for conflict in conflicts.find(registry.files, directories.MAINTAINED):
        text = f'{conflict.text()}, which resolve nowhere: remove "{conflict.stale}"'
        click.echo(f"warning: {escape(text)}", err=True)
    names = registry.devices
    lines = (
        line for name in names for line in [name, *(_shown(registry, name) if verbose else ())]
    )
    write_stdout("".join(f"{line}\n" for line in lines))
    click.echo(f"found {len(names)} CDI devices", err=True)


def as_object(registry: Registry) -> dict[str, Any]:
    """Return the object that `--json` prints for *registry*."""
    return {
        "devices": [_device(registry, name) for name in registry.devices],
        "unresolved": [
            {"name": name, "reason": reasons.why_unresolved(registry, name)}
            for name in registry.conflicting
        ],
        "conflicts": [
            {"remove": conflict.stale, "keep": conflict.kept, "names": list(conflict.names)}
            for conflict in conflicts.find(registry.files, directories.MAINTAINED)
        ],
        "vendors": registry.vendors,
        "classes": registry.classes,
        "files": [
            {
                "path": file.path,
                "kind": file.spec["kind"] if file.spec else None,
                "cdiVersion": file.spec["cdiVersion"] if file.spec else None,
                "error": {"category": file.error.category, "message": file.error.message}
                if file.error
                else None,
            }
            for file in registry.files
        ],
        "directories": list(registry.directories),
    }


def _device(registry: Registry, name: str) -> dict[str, Any]:
    *shadowed, file = registry.defining(name)
    return {
        "name": name,
        "file": file.path,
        "shadows": [other.path for other in shadowed],
        "edits": edits.describe(registry.resolve([name])),
    }


def _shown(registry: Registry, name: str) -> list[str]:
    device = _device(registry, name)
    lines = [f"file {device['file']}", *(f"in place of {path}" for path in device["shadows"])]
    return [f"  {escape(line)}" for line in [*lines, *device["edits"]]]
