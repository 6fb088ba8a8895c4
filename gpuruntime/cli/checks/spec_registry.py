# SPDX-License-Identifier: Apache-2.0
"""Load the CDI specs of the examined host, and find those that are in use."""

from __future__ import annotations

from collections.abc import Sequence

from cdi import registry, yamlio
from cdi.registry import Registry, SpecFile
from cdi.wire import Edits
from gpuruntime import remedies
from gpuruntime.cli import spec_renewal, stamp
from gpuruntime.cli.checks import engine_files
from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.request import parse
from gpuruntime.trusted_files import may_trust


def load_specs(machine: ExaminedMachine, spec_dirs: Sequence[str] = ()) -> Registry:
    """Return the specs of *spec_dirs*, by default of the configured directories.

    The registry has paths of this machine.
    """
    return registry.load(
        [our_path(machine, path) for path in spec_dirs or machine.config.spec_dirs],
        may_trust=may_trust,
        decode_yaml=yamlio.decode_all,
    )


def our_path(machine: ExaminedMachine, directory: str) -> str:
    """Return the path on this machine of *directory*; no symlink in a tree leads out of it."""
    if machine.is_live:
        return directory
    return machine.path(machine.real(directory) or directory)


def machine_path(machine: ExaminedMachine, path: str) -> str:
    """Return the path on the examined host of *path* on this machine."""
    return path if machine.is_live else path.removeprefix(machine.root)


def refresh_action(machine: ExaminedMachine, file: SpecFile, *options: str) -> str:
    """Return the action that writes the spec *file* again."""
    assert file.spec is not None
    spec_stamp = stamp.read(file.path) if machine.is_live else None
    if spec_stamp is not None:
        return remedies.stale_spec(
            file.path, remedies.DEFAULT_KIND, *spec_renewal.option_words(spec_stamp), *options
        )
    kind = file.spec["kind"]
    is_ours = parse.is_ours(f"{kind}=0", machine.config)
    return remedies.stale_spec(
        machine_path(machine, file.path), kind if is_ours else None, *options
    )


def in_use(machine: ExaminedMachine) -> tuple[list[SpecFile], list[SpecFile]]:
    """Return the valid specs of NVIDIA's kinds: those that define a device, and hidden ones.

    A spec is hidden if specs of later directories define all of its devices. An engine that is
    configured with other spec directories may still use it.
    """
    vendor = machine.config.default_kind.partition("/")[0]
    engines = engine_files.installed_engines(machine)
    views = [load_specs(machine)]
    views += [load_specs(machine, dirs) for dirs in {e.spec_dirs for e in engines if e.spec_dirs}]
    used: dict[str, SpecFile] = {}
    hidden: dict[str, SpecFile] = {}
    for view in views:
        for file in view.files:
            if file.spec is None or file.spec["kind"].partition("/")[0] != vendor:
                continue
            (hidden if is_hidden(view, file) else used).setdefault(file.path, file)
    return list(used.values()), [file for path, file in hidden.items() if path not in used]


def is_hidden(view: Registry, file: SpecFile) -> bool:
    """Return whether specs of later directories define every device of *file*."""
    assert file.spec is not None
    names = [f"{file.spec['kind']}={device}" for device in file.devices]
    return bool(names) and all(view.defining(name)[-1].priority > file.priority for name in names)


def edits_of(file: SpecFile) -> list[Edits]:
    """Return the edits of *file*: its own, and those of each device."""
    assert file.spec is not None
    own = file.spec.get("containerEdits") or Edits()
    return [own, *(device["containerEdits"] for device in file.spec["devices"])]
