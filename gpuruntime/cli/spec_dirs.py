# SPDX-License-Identifier: Apache-2.0
"""Shared by commands that read spec directories: two options, and the registry they select."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from cdi import registry, yamlio
from gpuruntime.errors import ConfigError
from gpuruntime.trusted_files import may_trust

# The incumbent's variable as well; both hold directories separated by commas.
VARIABLES = ("GPURUNTIME_CDI_SPEC_DIRS", "NVIDIA_CTK_CDI_SPEC_DIRS")


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
    """Return the registry of *spec_dirs*, or of the default directories; raise ConfigError."""
    directories = spec_dirs or _defaults()
    if not all(directories):
        raise ConfigError("a spec directory has no name", 'name it after "--spec-dir"')
    return registry.load(
        directories,
        may_trust=(lambda _: True) if allow_untrusted else may_trust,
        decode_yaml=yamlio.decode_all,
    )


def _defaults() -> tuple[str, ...]:
    for variable in VARIABLES:
        if variable in os.environ:
            return tuple(os.environ[variable].split(","))
    # Rootless engines read the user's own directories too, and let them count more.
    own = ("XDG_CONFIG_HOME", "XDG_RUNTIME_DIR") if os.geteuid() != 0 else ()
    homes = [os.environ.get(name, "") for name in own]
    return (*registry.DEFAULT_DIRECTORIES, *(f"{home}/cdi" for home in homes if home))
