# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi refresh`: write the CDI spec again if the host has changed."""

from __future__ import annotations

import os
from typing import Any

import click

from cdi import diff, document, store, yamlio
from cdi.errors import CdiError
from cdi.wire import Spec
from gpuruntime.cli import cdi_generate, generator, stamp
from gpuruntime.discover import fingerprint
from gpuruntime.errors import SpecError, escape

DEFAULT_OUTPUT = "/var/run/cdi/nvidia.yaml"


@click.command()
@generator.options
@click.option(
    "--output",
    default=DEFAULT_OUTPUT,
    show_default=True,
    envvar=["GPURUNTIME_CDI_OUTPUT", "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"],
    help="The spec: JSON if it ends in .json, else YAML.",
)
@click.option("--force", is_flag=True, help="Write it even if nothing has changed.")
def refresh(output: str, *, force: bool, **given: Any) -> None:  # noqa: ANN401 (click's)
    """Write the CDI spec again if the host has changed since, and say what has.

    A good spec stays as it is if the driver does not answer, or if a device of it cannot be had:
    then the exit status is 1. The options are those of "cdi generate".
    """
    chosen = generator.checked(**given)
    found = generator.fingerprint_of(chosen)
    known = stamp.read(output)
    if known is not None and not force and stamp.fits(known, found, chosen):
        click.echo(f'unchanged "{escape(output)}": the host is as it was', err=True)
        return
    if known is not None:
        parts = ", ".join(fingerprint.changes(known.fingerprint, found)) or "the options"
        click.echo(f"changed since: {escape(parts)}", err=True)
    inventory = generator.discover(chosen)
    cdi_generate.warn(inventory)
    spec = generator.document(chosen, inventory)
    old = _load(output)
    if old is not None and inventory.problems:
        _keep_what_is_better(output, old, spec, inventory.problems)
    format_ = "json" if output.endswith(".json") else "yaml"
    text = cdi_generate.encode(spec, format_, inventory, found)
    changed = cdi_generate.save(output, text)
    stamp.write(output, text, inventory.driver.version, found, chosen)
    for change in diff.compare(old, spec) if old is not None else ():
        click.echo(escape(change.line()), err=True)
    click.echo(f'{"wrote" if changed else "unchanged"} "{escape(output)}"', err=True)
    click.echo(escape(generator.summary(inventory, spec)), err=True)


def _load(path: str) -> Spec | None:
    """Return the spec at *path*; None if there is none that could be used."""
    try:
        return document.check(yamlio.decode(store.read(path)))
    except (OSError, CdiError):
        return None


def _keep_what_is_better(path: str, old: Spec, new: Spec, problems: tuple[str, ...]) -> None:
    """Raise SpecError if *old* has devices that *new* lacks because of *problems*."""
    there = {device["name"] for device in new["devices"]}
    lost = [device["name"] for device in old["devices"] if device["name"] not in there]
    if lost:
        raise SpecError(
            f'"{path}" stays as it is, for the new spec would lack {", ".join(lost)}: '
            f"{'; '.join(problems)}",
            f'mend that, or remove "{os.path.basename(path)}" and refresh again',
        )
