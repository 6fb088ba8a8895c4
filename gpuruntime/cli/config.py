# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime config`: compile config.toml for the start path."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from typing import Any

import click

from cdi import names
from cdi.errors import CdiError
from gpuruntime import config as settings
from gpuruntime.errors import ConfigError, escape
from gpuruntime.system.paths import replace_file

COMPANION = "launcher"
COMPANION_HEAD = "gpuruntime-launcher 1"
MAX_CONFIG_BYTES = 1 << 20


@click.group()
def config() -> None:
    """Work with the config file."""


@config.command("compile")
def compile_command() -> None:
    """Compile the config file in force for the start path, and say which that is."""
    found = settings.find(os.environ)
    if found is None:
        click.echo("no config file: the defaults are in force", err=True)
        return
    _, warnings = compile_file(found[0])
    for warning in warnings:
        click.echo(f"warning: {escape(warning)}", err=True)
    click.echo(f'compiled "{escape(found[0])}"', err=True)


def compile_file(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of *path* by key and warnings; store snapshot and companion if possible.

    Raises ConfigError if the file cannot be read or a value is wrong. An unknown key is a warning.
    """
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f'cannot read "{path}": {error.strerror}', "make the config file readable"
        ) from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f'"{path}" has more than {MAX_CONFIG_BYTES} bytes', "put a config file there"
        )
    try:
        document = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f'"{path}" is no TOML: {error}', "correct the file") from error
    values, warnings = _checked(document, path)
    try:
        _store(path, status, values)
    except OSError as error:
        warnings.append(
            f'each start compiles "{path}": cannot write below '
            f'"{settings.RUN_DIRECTORY}": {error.strerror}'
        )
    return values, warnings


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _checked(document: dict[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the known keys of *document* with their checked values, and warnings on others."""
    values, warnings = {}, []
    for key, value in _flatten(document).items():
        if key not in settings.DEFAULTS:
            near = difflib.get_close_matches(key, settings.DEFAULTS, 1)
            known = f'; the nearest known key is "{near[0]}"' if near else ""
            warnings.append(f'"{path}": the key "{key}" has no effect{known}')
            continue
        _check_value(key, value, path)
        if key.endswith(".log-level") and value not in settings.LOG_LEVELS:
            warnings.append(f'"{path}": "{key}" is "{value}", taken for "info"')
        values[key] = value
    return values, warnings


def _check_value(key: str, value: object, path: str) -> None:
    default = settings.DEFAULTS[key]
    kind = "a list of strings" if isinstance(default, list) else "a string"
    fits = isinstance(value, type(default))
    if fits and isinstance(value, list):
        fits = all(isinstance(item, str) and item for item in value)
    if not fits:
        raise ConfigError(f'"{path}": "{key}" is not {kind}', f"give {kind}")
    last = key.rpartition(".")[2]
    if last == "runtimes" and not value:
        raise ConfigError(f'"{path}": "{key}" is empty', 'name a runtime, as in ["runc"]')
    if last == "default-kind":
        vendor, cls = names.split_kind(str(value))
        try:
            names.check_vendor(vendor)
            names.check_class(cls)
        except CdiError as error:
            raise ConfigError(f'"{path}": "{key}": {error}', "use vendor/class") from error


def _store(path: str, status: os.stat_result, values: dict[str, Any]) -> None:
    """Write the snapshot, and the companion from which the launcher learns the runtimes."""
    os.makedirs(settings.RUN_DIRECTORY, mode=0o755, exist_ok=True)
    dirfd = os.open(settings.RUN_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        stamp = settings.stamp(path, status)
        snapshot = {"format": settings.FORMAT, "file": stamp, "values": values}
        data = json.dumps(snapshot).encode()
        replace_file(dirfd, os.path.basename(settings.SNAPSHOT), data, 0o644)
        runtimes = settings.Config(values, path).runtimes
        if not any("\n" in item for item in (path, *runtimes)):
            lines = [
                COMPANION_HEAD,
                f"config {path}",
                "stat " + " ".join(str(part) for part in stamp[1:]),
                *(f"runtime {item}" for item in runtimes),
                "end",
                "",
            ]
            replace_file(dirfd, COMPANION, os.fsencode("\n".join(lines)), 0o644)
    finally:
        os.close(dirfd)
