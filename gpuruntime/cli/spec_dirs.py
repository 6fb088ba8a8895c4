# SPDX-License-Identifier: Apache-2.0
"""Shared by commands that read or write spec directories: options, registry, conflicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import click

from cdi import conflicts, registry, yamlio
from cdi.conflicts import Conflict
from cdi.registry import Registry, SpecFile
from cdi.wire import Spec
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.errors import ArgumentError, SpecError, escape
from gpuruntime.trusted_files import may_trust

# The incumbent's variable as well; both hold directories separated by commas.
VARIABLES = ("GPURUNTIME_CDI_SPEC_DIRS", "NVIDIA_CTK_CDI_SPEC_DIRS")
DEFAULT_OUTPUT = "/var/run/cdi/nvidia.yaml"
# What the unit writes again and again, by both names of its directory.
MAINTAINED = (DEFAULT_OUTPUT, "/run/cdi/nvidia.yaml")


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--spec-dir` and `--allow-untrusted-spec-dirs` to a click command."""
    command = click.option(
        "--allow-untrusted-spec-dirs",
        "allow_untrusted",
        is_flag=True,
        help="Also read what others than root or you may have written.",
    )(command)
    return click.option(
        "--spec-dir",
        "spec_dirs",
        multiple=True,
        metavar="DIR",
        help="Directory of specs; the last one named counts most.  "
        f"[default: ${VARIABLES[0]}, else /etc/cdi, /var/run/cdi]",
    )(command)


def load(spec_dirs: tuple[str, ...], *, allow_untrusted: bool) -> registry.Registry:
    """Return the registry of *spec_dirs*, or of the default directories; raise ArgumentError."""
    directories = spec_dirs or in_force()
    if not all(directories):
        raise ArgumentError("a spec directory has no name", 'name it after "--spec-dir"')
    return registry.load(
        directories,
        may_trust=(lambda _: True) if allow_untrusted else may_trust,
        decode_yaml=yamlio.decode_all,
    )


def in_force() -> tuple[str, ...]:
    """Return the directories that are read where no option names any."""
    for variable in VARIABLES:
        if variable in os.environ:
            return tuple(os.environ[variable].split(","))
    # Rootless engines read the user's own directories too, and let them count more.
    own = ("XDG_CONFIG_HOME", "XDG_RUNTIME_DIR") if os.geteuid() != 0 else ()
    homes = [os.environ.get(name, "") for name in own]
    return (*registry.DEFAULT_DIRECTORIES, *(f"{home}/cdi" for home in homes if home))


def are_read(directory: str) -> bool:
    """Return whether consumers of CDI on this host read specs in *directory*."""
    configured = ExaminedMachine("/", os.environ).config.spec_dirs
    wanted = {*in_force(), *registry.DEFAULT_DIRECTORIES, *configured}
    return os.path.realpath(directory) in {os.path.realpath(place) for place in wanted if place}


def conflicts_in(directories: Iterable[str]) -> list[Conflict]:
    """Return the conflicts in each of *directories*, also of files that only others would use."""
    known = _read_all(dict.fromkeys(map(os.path.abspath, directories)))
    return list(conflicts.find(known.files, MAINTAINED))


def check_beside(path: str, spec: Spec, *, force: bool) -> None:
    """Raise SpecError if *spec*, written to *path*, would conflict with another file there.

    With *force* it is a warning on standard error. Only directories that are read matter.
    """
    path = os.path.abspath(path)
    directory = os.path.dirname(path)
    if not path.endswith(registry.ENDINGS) or not are_read(directory):
        return
    ours = SpecFile(path, 0)
    ours.take(spec)
    for other in _read_all([directory]).files:
        names = conflicts.shared(ours, other)
        if not names or other.path == path:
            continue
        text = (
            f'"{other.path}" defines {conflicts.some(names)} too, and engines resolve no device '
            "that two files of one directory define"
        )
        if not force:
            raise SpecError(
                f'cannot write "{path}": {text}',
                f'remove "{other.path}", or write to that file; "--force" writes both',
            )
        click.echo(f"warning: {escape(text)}", err=True)


def _read_all(directories: Iterable[str]) -> Registry:
    """Return the registry of *directories*, whoever owns them: engines do not look at that."""
    return registry.load(directories, may_trust=lambda _: True, decode_yaml=yamlio.decode_all)
