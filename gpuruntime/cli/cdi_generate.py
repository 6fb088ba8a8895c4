# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi generate`: write a CDI spec of this machine's GPUs."""

from __future__ import annotations

import os
from typing import Any

import click

from cdi import generate as producer
from cdi.wire import Spec
from gpuruntime.cli import generator
from gpuruntime.cli.output import write_stdout
from gpuruntime.discover import fingerprint
from gpuruntime.errors import escape
from gpuruntime.model import Inventory

_ENDINGS = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}


FORMAT_OPTION = click.option(
    "--format",
    "format_",
    type=click.Choice(["json", "yaml"], case_sensitive=False),
    envvar=["GPURUNTIME_CDI_FORMAT", "NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT"],
    help="Format of the spec.  [default: by the ending of --output, else yaml]",
)


@click.command()
@generator.options
@click.option(
    "--output",
    default="-",
    envvar=["GPURUNTIME_CDI_OUTPUT", "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"],
    help='File to write, "-" for standard output.  [default: -]',
)
@FORMAT_OPTION
@click.option(
    "--force", is_flag=True, help="Write it even if another file defines the same devices."
)
def generate(
    output: str,
    format_: str | None,
    *,
    force: bool,
    **values: Any,  # noqa: ANN401 (click's)
) -> None:
    """Write a CDI spec of this machine's GPUs.

    Devices are named by index, by UUID and "all". A consumer reads the files ending in .json or
    .yaml in /etc/cdi and /var/run/cdi, and resolves no device that two files of one directory
    define. The last line on standard error sums up what was found.
    """
    chosen = generator.checked(**values)
    output = output or "-"
    path, format_ = target(output, format_)
    # Before the discovery, so that the next refresh notices changes made during it.
    state = generator.state_of(chosen) if output != "-" else {}
    inventory = generator.discover(chosen)
    warn(inventory)
    spec = generator.document(chosen, inventory)
    text = encode(spec, format_, inventory)
    if output == "-":
        write_stdout(text)
    else:
        # These imports take a fifth of the command's time, and only a file needs them.
        from gpuruntime.cli import spec_dirs, stamp  # noqa: PLC0415

        spec_dirs.check_beside(path, spec, force=force)
        changed = spec_dirs.write_text(path, text)
        stamp.write(
            path, text, spec, driver_version=inventory.driver.version, state=state, chosen=chosen
        )
        click.echo(f'{"wrote" if changed else "unchanged"} "{escape(path)}"', err=True)
    click.echo(escape(generator.summary(inventory, spec)), err=True)


def warn(inventory: Inventory) -> None:
    """Print on standard error the platform, and a warning for each device or file left out."""
    if inventory.decision:
        click.echo(escape(inventory.decision), err=True)
    sentences = [*generator.problems(inventory), *map(str, inventory.left_out)]
    for sentence in dict.fromkeys(sentences):
        click.echo(f"warning: {escape(sentence)}", err=True)


def target(output: str, format_: str | None) -> tuple[str, str]:
    """Return the path to write for *output* and the format; warn if no consumer will read it."""
    extension = os.path.splitext(output)[1].lower()
    ending = _ENDINGS.get(extension)
    format_ = (format_ or ending or "yaml").lower()
    if ending and format_ != ending:
        click.echo(f'warning: {format_} is written to "{escape(output)}"', err=True)
    path = output if ending or output == "-" else f"{output}.{format_}"
    if output != "-" and not path.endswith((".json", ".yaml")):
        text = f'consumers do not read "{path}": name it .yaml or .json'
        click.echo(f"warning: {escape(text)}", err=True)
    return path, format_


def encode(spec: Spec, format_: str, inventory: Inventory) -> str:
    """Return the text of *spec*; YAML has a comment with the driver and the boot."""
    text = producer.encode_canonical(spec, format_)
    if format_ == "json":
        return text
    return text.replace("---\n", f"---\n{_comment(inventory.driver.version)}", 1)


def _comment(driver_version: str) -> str:
    """Return the comment that names the driver version and the boot of the spec.

    It does not have the state of the host, which changes more often than the spec.
    """
    version = escape(driver_version) or "none"
    return f"# Made for driver {version}, boot {escape(fingerprint.boot_id())}.\n"
