# SPDX-License-Identifier: Apache-2.0
"""Generate a CDI spec again from its options; shared by `cdi refresh` and `doctor`."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import click

from cdi import store
from cdi.errors import CdiError
from cdi.wire import Spec
from gpuruntime import probes
from gpuruntime.cli import cdi_generate, generator
from gpuruntime.cli.generator import GenerateOptions
from gpuruntime.cli.stamp import Stamp
from gpuruntime.errors import GpuRuntimeError
from gpuruntime.model import Inventory


@dataclasses.dataclass(frozen=True, slots=True)
class Renewal:
    """A spec of the current host, with the state and inventory that it was made from."""

    state: dict[str, Any]
    inventory: Inventory
    spec: Spec


def renew(chosen: GenerateOptions) -> Renewal:
    """Return the spec of the current host for *chosen*; raise GpuRuntimeError."""
    # Before the discovery, so that the next refresh notices changes made during it.
    state = generator.state_of(chosen)
    inventory = generator.discover(chosen)
    return Renewal(state, inventory, generator.document(chosen, inventory))


def differences(path: str, stamp: Stamp) -> list[str]:
    """Return the changed parts of the host if they change the spec at *path*.

    *stamp* is its stamp. [] if a refresh with the same options would write the same text. Raises
    GpuRuntimeError.
    """
    changed = probes.changed(stamp.fingerprint)
    if not changed:
        return []
    renewal = renew(generator.from_plain(stamp.options))
    text = cdi_generate.encode(renewal.spec, _format(path), renewal.inventory)
    try:
        return [] if store.read(path) == text else changed
    except (OSError, CdiError):
        return changed


def option_words(stamp: Stamp) -> list[str]:
    """Return the options of `cdi refresh` that make the spec of *stamp* again.

    Options with their default values are omitted.
    """
    try:
        with _options.make_context("refresh", []) as context:
            defaults = generator.checked(**context.params)._asdict()
    except (GpuRuntimeError, click.ClickException):
        return []
    words = []
    for option in _options.params:
        assert option.name is not None
        value, default = stamp.options.get(option.name), defaults[option.name]
        if value in (default, list(default) if isinstance(default, tuple) else default):
            continue
        if isinstance(value, bool):
            words.append(option.opts[0])
        elif isinstance(value, list):
            words += [f"{option.opts[0]} {shlex.quote(item)}" for item in value]
        else:
            words.append(f"{option.opts[0]} {shlex.quote(str(value))}")
    return words


@click.command()
@generator.options
def _options(**values: Any) -> None:  # noqa: ANN401 (click's)
    """Parse the options of a generator."""


def _format(path: str) -> str:
    return "json" if path.endswith(".json") else "yaml"
