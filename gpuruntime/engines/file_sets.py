# SPDX-License-Identifier: Apache-2.0
"""The config files that register a runtime with each engine; nothing is written here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial

from gpuruntime.engines import (
    config_paths,
    containerd,
    crio,
    docker,
    files,
    k0s,
    podman,
    rancher,
)
from gpuruntime.engines.config_files import ConfigFile, FileSet, Make
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import Registration, RuntimeEntry


def to_configure(engine: EngineConfig, entry: RuntimeEntry, source: str | None = None) -> FileSet:
    """Return the files of *engine* for *entry*.

    *source* is the config that the engine itself prints: options are copied from it. Raises
    ConfigError.
    """
    file_set = _files_of(engine, entry, source)
    drop_in = _drop_in_of(file_set)
    registration = Registration(entry, engine.name, engine.config, drop_in, source)
    return _registered(engine, file_set, (registration,))


def to_undo(engine: EngineConfig, entry: RuntimeEntry) -> FileSet:
    """Return the files of *engine* that may contain *entry*; raise ConfigError."""
    if engine.family == "template":
        file_set = rancher.files_to_undo(engine, entry)
        registration = Registration(entry, engine.name, engine.config, "")
        return _registered(engine, file_set, (registration,))
    config_files: dict[str, ConfigFile] = {}
    registrations = []
    for path in _drop_ins(engine, entry):
        variant = dataclasses.replace(engine, drop_in=path, last="")
        # Each file set includes the file that imports the drop-ins.
        file_set = _files_of(variant, entry, None)
        config_files.update({file.path: file for file in file_set.files})
        drop_in = _drop_in_of(file_set)
        registrations.append(Registration(entry, engine.name, engine.config, drop_in))
    # Drop-ins first: whether an import is still needed depends on which of them are removed.
    ordered = sorted(config_files.values(), key=lambda file: not file.is_generated)
    return _registered(engine, FileSet(ordered, []), tuple(registrations))


def _files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    try:
        return _FILES_OF[engine.family](engine, entry, source)
    except BadFileError as error:
        raise error.of(engine.config) from error


def _drop_in_of(file_set: FileSet) -> str:
    """Return the drop-in of *file_set*, "" if the config file itself is edited."""
    return next((file.path for file in file_set.files if file.is_generated), "")


def _registered(
    engine: EngineConfig, file_set: FileSet, registrations: tuple[Registration, ...]
) -> FileSet:
    config_files = [
        dataclasses.replace(
            file, registrations=registrations, configure_for=partial(_edit, engine, file.path)
        )
        for file in file_set.files
    ]
    return FileSet(config_files, file_set.notes)


def _edit(engine: EngineConfig, path: str, registration: Registration) -> Make:
    """Return the edit of the file *path* that adds *registration*."""
    engine = dataclasses.replace(engine, drop_in=registration.drop_in, last="")
    for file in _files_of(engine, registration.entry, registration.source).files:
        if file.path == path:
            return file.configure
    return lambda text: text


def _drop_ins(engine: EngineConfig, entry: RuntimeEntry) -> list[str]:
    """Return the drop-ins that may contain *entry*; the usual one if none exists."""
    paths = [path for path in (engine.drop_in, engine.last) if path and os.path.exists(path)]
    paths += [
        path
        for path in config_paths.other_drop_ins(engine.drop_in)
        if path != engine.last and os.path.exists(path) and _has_entry(engine, path, entry)
    ]
    return paths or [engine.drop_in]


def _has_entry(engine: EngineConfig, path: str, entry: RuntimeEntry) -> bool:
    text = files.read(path)
    variant = dataclasses.replace(engine, drop_in=path, last="")
    try:
        return any(
            file.remove(text) != text
            for file in _files_of(variant, entry, None).files
            if file.path == path
        )
    except BadFileError as error:
        raise error.of(path) from error


_FILES_OF: dict[str, Callable[[EngineConfig, RuntimeEntry, str | None], FileSet]] = {
    "docker": docker.files_of,
    "containerd": containerd.files_of,
    "k0s": k0s.files_of,
    "crio": crio.files_of,
    "podman": podman.files_of,
    "template": rancher.files_of,
}
