# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi transform`: rewrite the paths of a CDI spec."""

from __future__ import annotations

import click

from cdi import generate
from cdi import transform as paths
from cdi.transform import Side
from gpuruntime.cli import spec_dirs, spec_files
from gpuruntime.cli.output import write_stdout
from gpuruntime.errors import ArgumentError, escape

_ENDINGS = (".json", ".yaml", ".yml")


@click.group()
def transform() -> None:
    """Rewrite the paths of a CDI spec."""


@transform.command()
@click.option("--from", "old", default="", help="Directory to replace.  [default: /]")
@click.option("--to", "new", default="", help="What to put in its place.  [default: /]")
@click.option(
    "--relative-to",
    type=click.Choice(["host", "container"]),
    default="host",
    show_default=True,
    help="Whose paths to rewrite.",
)
@click.option(
    "--input", "source", default="-", show_default=True, help='Spec, "-" for standard input.'
)
@click.option(
    "--output", default="-", show_default=True, help='File to write, "-" for standard output.'
)
@click.option(
    "--force", is_flag=True, help="Write it even if another file defines the same devices."
)
def root(old: str, new: str, relative_to: Side, source: str, output: str, *, force: bool) -> None:
    """Put one directory in place of another in the paths of a spec.

    Only what is that directory or below it changes: /run/nv is not a part of /run/nvidia. With
    --relative-to host the sources of mounts and device nodes and the programs of hooks are
    rewritten, with container their destinations; the arguments of a hook on the side where it
    runs. The version is kept unless the new spec needs a newer one.

    The file is JSON if its name ends in .json, else YAML, as is standard output; .yaml is appended
    to a name that does not end in .json, .yaml or .yml.
    """
    for option, value in (("--from", old), ("--to", new)):
        if value and not value.startswith("/"):
            raise ArgumentError(
                f'"{option} {value}" is not absolute', f'name an absolute path with "{option}"'
            )
    before = spec_files.load(source or "-")
    after = paths.transform_root(before, old, new, relative_to=relative_to)
    if after["cdiVersion"] != before["cdiVersion"]:
        text = f"the new spec needs version {after['cdiVersion']}, not {before['cdiVersion']}"
        click.echo(f"warning: {escape(text)}", err=True)
    if output in ("", "-"):
        write_stdout(generate.encode(after, "yaml"))
    else:
        path = output if output.endswith(_ENDINGS) else f"{output}.yaml"
        spec_dirs.check_beside(path, after, force=force)
        spec_dirs.write_spec(path, after)
        click.echo(f'wrote "{escape(path)}"', err=True)
