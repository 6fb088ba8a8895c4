# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi refresh`: write the CDI spec again if the host has changed."""

from __future__ import annotations

import os
import re
from typing import Any

import click

from cdi import diff, document, store
from cdi.errors import CdiError
from cdi.wire import Edits, Spec
from gpuruntime.cli import (
    cdi_generate,
    features,
    generator,
    idle,
    spec_dirs,
    spec_renewal,
    stamp,
)
from gpuruntime.errors import ArgumentError, SpecError, escape

DIFFERENT = 1
_VERSION = re.compile(r"\.[0-9][0-9.]*\Z")


@click.command()
@generator.options
@click.option(
    "--output",
    default=spec_dirs.DEFAULT_OUTPUT,
    show_default=True,
    envvar=["GPURUNTIME_CDI_OUTPUT", "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"],
    help="The spec.",
)
@cdi_generate.FORMAT_OPTION
@click.option(
    "--force",
    is_flag=True,
    help="Write it even if nothing has changed, or if another file defines the same devices.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Write nothing and query no driver; exit with 1 if the spec is not up to date.",
)
def refresh(
    output: str,
    format_: str | None,
    *,
    force: bool,
    check: bool,
    **values: Any,  # noqa: ANN401 (click's)
) -> None:
    """Write the CDI spec again if the host has changed since, and say what has.

    A good spec stays as it is if the driver does not answer, if a device of it cannot be had, or
    if another file of the directory defines the same devices: then the exit status is 1. The
    options are those of "cdi generate". Without a GPU, a driver and a spec there is nothing to do.
    "--check" only compares, and exits with 1 if a refresh would query the driver, or fail.
    """
    if output in ("", "-"):
        raise ArgumentError("standard output cannot be refreshed", 'name a file with "--output"')
    chosen = generator.checked(**values)
    path, format_ = cdi_generate.target(output, format_)
    # If a spec exists but the GPU does not, the command fails instead.
    is_of_driver = chosen.mode not in features.MODES and not os.path.lexists(path)
    if is_of_driver and (nothing := idle.reason(chosen.driver_root)):
        click.echo(nothing, err=True)
        return
    old_stamp = stamp.read(path)
    if old_stamp is not None:
        changed = stamp.changed(old_stamp, chosen)
        if not changed and not force:
            # Another file may have been added since.
            if spec_dirs.has_others(path) and (old := _load(path)) is not None:
                spec_dirs.check_beside(path, old, force=False)
            click.echo(f'unchanged "{escape(path)}": the host is as it was', err=True)
            return
        if changed:
            click.echo(f"changed since: {escape(', '.join(changed))}", err=True)
    if check:
        click.get_current_context().exit(DIFFERENT)
    old = _load(path)
    renewal = spec_renewal.renew(chosen)
    inventory, spec = renewal.inventory, renewal.spec
    cdi_generate.warn(inventory)
    problems = generator.problems(inventory)
    if old is not None and problems:
        _refuse_loss(path, old, spec, problems)
    spec_dirs.check_beside(path, spec, force=force)
    text = cdi_generate.encode(spec, format_, inventory)
    has_changed = spec_dirs.write_text(path, text)
    stamp.write(
        path,
        text,
        spec,
        driver_version=inventory.driver.version,
        state=renewal.state,
        chosen=chosen,
    )
    for change in diff.compare(old, spec) if old is not None else ():
        click.echo(escape(change.line()), err=True)
    click.echo(f'{"wrote" if has_changed else "unchanged"} "{escape(path)}"', err=True)
    click.echo(escape(generator.summary(inventory, spec)), err=True)


def _load(path: str) -> Spec | None:
    """Return the spec at *path*; None if it is missing or unusable."""
    # The import of PyYAML takes longer than the rest of a refresh that finds nothing to do.
    from cdi import yamlio  # noqa: PLC0415

    try:
        return document.check(yamlio.decode(store.read(path)))
    except (OSError, CdiError):
        return None


def _refuse_loss(path: str, old: Spec, new: Spec, problems: tuple[str, ...]) -> None:
    """Raise SpecError if *old* has devices or files that *new* lacks because of *problems*."""
    parts = _parts(new)
    missing = [name for name in _parts(old) if name not in parts]
    if missing:
        raise SpecError(
            f'"{path}" stays as it is, for the new spec would lack {", ".join(missing)}: '
            f"{'; '.join(problems)}",
            f'mend that, or remove "{os.path.basename(path)}" and refresh again',
        )


def _parts(spec: Spec) -> list[str]:
    """Return the names of the devices and the files of *spec*, without the driver's version."""
    mounts = spec.get("containerEdits", Edits()).get("mounts", [])
    files = [os.path.basename(mount["containerPath"]) for mount in mounts]
    return [*(device["name"] for device in spec["devices"]), *(_VERSION.sub("", f) for f in files)]
