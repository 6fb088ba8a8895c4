# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime cdi generate`: write a CDI spec of this machine's GPUs."""

from __future__ import annotations

import os
import shutil
import sys

import click

from cdi import generate as document
from cdi import store
from cdi.errors import CdiError
from cdi.wire import Spec
from gpuruntime import plan
from gpuruntime.cli import spec_files
from gpuruntime.discover.inventory import discover
from gpuruntime.errors import ConfigError, SpecError, escape
from gpuruntime.trust import may_trust

KIND = "nvidia.com/gpu"
_ENDINGS = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}


@click.command()
@click.option(
    "--driver-root",
    default="/",
    show_default=True,
    envvar=["GPURUNTIME_DRIVER_ROOT", "NVIDIA_CTK_DRIVER_ROOT"],
    help="Directory below which the driver is installed.",
)
@click.option(
    "--dev-root",
    envvar=["GPURUNTIME_DEV_ROOT", "NVIDIA_CTK_DEV_ROOT"],
    help='Directory whose "dev" holds the device nodes.  [default: the driver root]',
)
@click.option(
    "--output",
    default="-",
    envvar=["GPURUNTIME_CDI_OUTPUT", "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"],
    help='File to write, "-" for standard output.  [default: -]',
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["json", "yaml"], case_sensitive=False),
    envvar=["GPURUNTIME_CDI_FORMAT", "NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT"],
    help="Format of the spec.  [default: by the ending of --output, else yaml]",
)
@click.option(
    "--hook-path",
    "--nvidia-cdi-hook-path",
    envvar=["GPURUNTIME_CDI_HOOK_PATH", "NVIDIA_CTK_CDI_HOOK_PATH"],
    help="Path of gpu-cdi-hook on the hosts that use the spec.  [default: the installed one]",
)
@click.option(
    "--max-spec-version",
    envvar="GPURUNTIME_CDI_MAX_SPEC_VERSION",
    metavar="VERSION",
    help="Leave out what this version of the format does not have.",
)
def generate(
    driver_root: str,
    dev_root: str | None,
    output: str,
    format_: str | None,
    hook_path: str | None,
    max_spec_version: str | None,
) -> None:
    """Write a CDI spec of this machine's GPUs.

    Devices are named by index, by UUID and "all". A consumer reads the files ending in .json or
    .yaml in /etc/cdi and /var/run/cdi.
    """
    output = output or "-"
    inventory = discover(driver_root or "/", dev_root or driver_root or "/")
    for problem in inventory.problems:
        click.echo(f"warning: {escape(problem)}", err=True)
    common = plan.common_edits(inventory, _hook_path(hook_path))
    try:
        spec = document.spec(KIND, plan.devices(inventory), common)
    except CdiError as error:
        raise SpecError(f"the generated spec is invalid: {error}") from error
    if max_spec_version:
        spec = _lowered(spec, max_spec_version)
    ending = _ENDINGS.get(os.path.splitext(output)[1].lower())
    chosen = (format_ or ending or "yaml").lower()
    if ending and chosen != ending:
        click.echo(f'warning: {chosen} is written to "{escape(output)}"', err=True)
    text = document.encode(spec, chosen)
    if output == "-":
        spec_files.write_stdout(text)
    else:
        _save(output if ending else f"{output}.{chosen}", text, len(inventory.gpus))


def _lowered(spec: Spec, max_version: str) -> Spec:
    """Return *spec* for readers of *max_version*, warning of what it lacks; raise SpecError."""
    try:
        lowered, dropped = document.lower(spec, max_version)
    except CdiError as error:
        raise SpecError(
            f"the spec cannot be written for version {max_version}: {error}",
            'leave out "--max-spec-version", or name a newer one',
        ) from error
    for line in dropped:
        click.echo(f"warning: left out of {escape(line)}", err=True)
    return lowered


def _save(path: str, text: str, gpu_count: int) -> None:
    try:
        changed = store.save(path, text, may_trust=may_trust)
    except CdiError as error:
        raise SpecError(
            f'cannot write "{path}": {error}', "take write access from group and others"
        ) from error
    except OSError as error:
        raise SpecError(
            f'cannot write "{path}": {error.strerror}',
            'name another file with "--output", or run as root',
        ) from error
    state = "wrote" if changed else "unchanged"
    click.echo(f'{state} "{escape(path)}": {gpu_count} GPUs', err=True)


def _hook_path(given: str | None) -> str:
    """Return the absolute path of the hook that the spec names; raise ConfigError if unknown."""
    if given:
        if not given.startswith("/"):
            raise ConfigError(
                f'the hook path "{given}" is not absolute',
                "name the hook by its absolute path",
            )
        return given
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), plan.HOOK_NAME)
    found = beside if os.access(beside, os.X_OK) else shutil.which(plan.HOOK_NAME)
    if found is None:
        raise ConfigError(
            f'"{plan.HOOK_NAME}" is neither beside this program nor on PATH',
            'name it with "--hook-path"',
        )
    return os.path.abspath(found)
