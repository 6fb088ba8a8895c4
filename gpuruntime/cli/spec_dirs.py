# SPDX-License-Identifier: Apache-2.0
"""Shared by commands that read or write spec directories: options, registry, conflicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from cdi import conflicts, registry, store
from cdi.conflicts import Conflict
from cdi.errors import CdiError
from cdi.registry import Registry, SpecFile
from cdi.wire import Spec
from gpuruntime.cli import config_in_force
from gpuruntime.errors import ArgumentError, ConfigError, SpecError, escape
from gpuruntime.trusted_files import may_trust

# The incumbent's variable as well; both hold directories separated by commas.
VARIABLES = ("GPURUNTIME_CDI_SPEC_DIRS", "NVIDIA_CTK_CDI_SPEC_DIRS")
DEFAULT_OUTPUT = "/var/run/cdi/nvidia.yaml"
# The spec that the systemd unit writes, by both names of its directory.
MAINTAINED = (DEFAULT_OUTPUT, "/run/cdi/nvidia.yaml")
_KNOWN = (*registry.DEFAULT_DIRECTORIES, "/run/cdi")


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
        decode_yaml=_decode_yaml,
    )


def in_force() -> tuple[str, ...]:
    """Return the directories that are read if no option names any."""
    for variable in VARIABLES:
        if variable in os.environ:
            return tuple(os.environ[variable].split(","))
    # Rootless engines read the user's own directories too, with higher precedence.
    variables = ("XDG_CONFIG_HOME", "XDG_RUNTIME_DIR") if os.geteuid() != 0 else ()
    homes = [os.environ.get(name, "") for name in variables]
    return (*registry.DEFAULT_DIRECTORIES, *(f"{home}/cdi" for home in homes if home))


def are_read(directory: str) -> bool:
    """Return whether consumers of CDI on this host read specs in *directory*."""
    places = {*in_force(), *_KNOWN, *_configured()}
    return os.path.realpath(directory) in {os.path.realpath(place) for place in places if place}


def _configured() -> tuple[str, ...]:
    """Return the spec directories of config.toml, none if that file cannot be used."""
    try:
        return config_in_force.load().spec_dirs
    except ConfigError:
        return ()


def conflicts_in(directories: Iterable[str]) -> list[Conflict]:
    """Return the conflicts in each of *directories*, whoever owns the files."""
    specs = _read_all(dict.fromkeys(map(os.path.abspath, directories)))
    return list(conflicts.find(specs.files, MAINTAINED))


def check_beside(path: str, spec: Spec, *, force: bool) -> None:
    """Raise SpecError if *spec*, written to *path*, would conflict with another file there.

    With *force*, print a warning instead. Directories that no consumer reads are ignored.
    """
    path = os.path.abspath(path)
    directory = os.path.dirname(path)
    if not path.endswith(registry.ENDINGS) or not are_read(directory):
        return
    others = [file for file in _read_all([directory]).files if file.path != path]
    if not others:
        return
    new_file = SpecFile(path, 0)
    new_file.take(spec)
    for other in others:
        names = conflicts.shared(new_file, other)
        if not names:
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


def has_others(path: str) -> bool:
    """Return whether the directory of *path* has, or may have, another spec."""
    directory, name = os.path.split(os.path.abspath(path))
    try:
        return any(
            item.endswith(registry.ENDINGS) and item != name for item in os.listdir(directory)
        )
    except OSError:
        return True


def write_text(path: str, text: str) -> bool:
    """Write *text* to *path*; return whether that changed the file; raise SpecError.

    A missing directory is created only if consumers of CDI read specs in it: otherwise it is more
    likely a typing error.
    """
    with _spec_errors(path):
        return store.save(path, text, may_trust=may_trust, make_directory=_may_make_for(path))


def write_spec(path: str, spec: Spec) -> bool:
    """Write *spec* to *path*, in the format of its ending, as `write_text` does."""
    with _spec_errors(path):
        return store.save_document(
            spec, path, may_trust=may_trust, make_directory=_may_make_for(path)
        )


def _may_make_for(path: str) -> bool:
    return are_read(os.path.dirname(os.path.abspath(path)))


@contextmanager
def _spec_errors(path: str) -> Iterator[None]:
    """Turn the errors of writing to *path* into SpecError."""
    try:
        yield
    except CdiError as error:
        raise SpecError(
            f'cannot write "{path}": {error}',
            'name a file in a directory that only you can write to with "--output"',
        ) from error
    except FileNotFoundError as error:
        directory = os.path.dirname(os.path.abspath(path))
        raise SpecError(
            f'cannot write "{path}": there is no directory "{directory}"',
            'make that directory, or name another file with "--output"',
        ) from error
    except OSError as error:
        raise SpecError(
            f'cannot write "{path}": {error.strerror}',
            'name another file with "--output", or run as root',
        ) from error


def _decode_yaml(texts: dict[str, str]) -> dict[str, Any]:
    # The import of PyYAML takes as long as a whole command: only if a file needs it.
    from cdi import yamlio  # noqa: PLC0415

    return yamlio.decode_all(texts)


def _read_all(directories: Iterable[str]) -> Registry:
    """Return the registry of *directories*, whoever owns them: engines ignore the owner."""
    return registry.load(directories, may_trust=lambda _: True, decode_yaml=_decode_yaml)
