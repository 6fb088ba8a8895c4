# SPDX-License-Identifier: Apache-2.0
"""Register the installed runtime with an engine, as `gpuruntime runtime configure` does."""

from __future__ import annotations

import dataclasses
import os

from gpunode.install.journal import Registered
from gpuruntime.engines import (
    config_paths,
    file_changes,
    file_sets,
    files,
    kubelet,
    undo_records,
)
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.file_changes import FileChange
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.errors import ArgumentError

_BRAND = "gpuruntime"


@dataclasses.dataclass(frozen=True, slots=True)
class Runtime:
    """The runtime to register: its *name*, its *path* on the host, and its options."""

    name: str
    path: str
    is_default: bool = False
    has_cdi: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The *changes* to the files of an engine, and *notes* for the user; nothing is written."""

    changes: list[FileChange]
    notes: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether the files are as they must be."""
        return all(change.before == change.after for change in self.changes)


def choose(engine: str, config: str) -> str:
    """Return the name of the engine to configure; raise ConfigError if that is not one."""
    if config and not os.path.isabs(config):
        raise ArgumentError(f'the config "{config}" is not an absolute path', "begin it with /")
    return config_paths.ALIASES.get(engine, engine) or config_paths.choose(
        config_paths.this_host()
    )


def plan(registered: Registered, runtime: Runtime) -> Plan:
    """Return what registers *runtime*; raise ConfigError."""
    engine = _engine(registered)
    entry = RuntimeEntry(
        runtime.name,
        runtime.path,
        is_default=runtime.is_default,
        has_cdi=runtime.has_cdi,
        has_systemd_cgroup=kubelet.uses_systemd_cgroups(),
    )
    entry.check(is_absolute=True)
    file_set = file_sets.to_configure(engine, entry)
    return Plan(file_changes.to_configure(file_set.files, undo_records.DIRECTORY), file_set.notes)


def plan_removal(registered: Registered, path: str) -> Plan:
    """Return what restores the files of the engine; raise ConfigError."""
    file_set = file_sets.to_undo(_engine(registered), RuntimeEntry(registered.name, path))
    return Plan(file_changes.to_undo(file_set.files, undo_records.DIRECTORY), file_set.notes)


def carry_out(plan: Plan) -> list[str]:
    """Write the files of *plan*, and return a line for each; raise ConfigError."""
    _remove_leftovers(plan)
    return file_changes.configure(plan.changes, undo_records.DIRECTORY)


def carry_out_removal(plan: Plan) -> list[str]:
    """Restore the files of *plan*, and return a line for each; raise ConfigError."""
    _remove_leftovers(plan)
    return file_changes.undo(plan.changes, undo_records.DIRECTORY)


def _remove_leftovers(plan: Plan) -> None:
    for directory in {
        undo_records.DIRECTORY,
        *(os.path.dirname(change.path) for change in plan.changes),
    }:
        files.remove_leftovers(directory)


def restart_command(engine: str) -> str:
    """Return the command that restarts *engine*, "" for one without a daemon."""
    return config_paths.find(engine, config_paths.this_host(), _BRAND).restart


def _engine(registered: Registered) -> EngineConfig:
    engine = config_paths.find(registered.engine, config_paths.this_host(), _BRAND)
    if not registered.config or registered.config == engine.config:
        return engine
    engine = config_paths.beside(engine, registered.config, _BRAND)
    return dataclasses.replace(engine, config=registered.config, socket="")
