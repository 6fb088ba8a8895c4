# SPDX-License-Identifier: Apache-2.0
"""The config files of containerd and MicroK8s, and the edits of each file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from gpuruntime.engines import (
    containerd_document,
    containerd_imports,
    containerd_socket,
    files,
    toml_text,
)
from gpuruntime.engines.config_files import FileSet, drop_in, edited
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.document_edits import Edit
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.errors import ConfigError


def files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    """Return the files of *engine*, a containerd or a MicroK8s; may raise BadFileError.

    *source* is the config that the program prints; None: the config file is read.
    """
    text = files.read(engine.config)
    if text is None and engine.name == "microk8s":
        # Only microk8s itself can create its template.
        raise ConfigError(f'"{engine.config}" does not exist', "install microk8s first")
    main = toml_text.parse(text or "")
    version = containerd_document.version_of(main) if main else _new_version(engine.socket)
    effective_document = main
    if source is not None and (version > 1 or not main):
        effective_document = toml_text.parse(source)
        version = containerd_document.version_of(effective_document)
        if main and containerd_document.version_of(main) > version:
            raise ConfigError(
                f'"{engine.config}" has version {containerd_document.version_of(main)}, but the '
                f"queried containerd has version {version}: the file belongs to another one",
                'name its program with "--executable-path", or use "--config-source file"',
            )
    cri = containerd_document.cri_settings(effective_document, version)
    notes = []
    if containerd_document.is_cri_disabled(main):
        notes.append(
            f'"{engine.config}" disables the CRI plugin by "disabled_plugins": Kubernetes '
            "cannot use this containerd"
        )
    if containerd_document.runtime_to_copy(cri, entry) is None and not entry.has_systemd_cgroup:
        notes.append(
            f'no runtime to copy options from: "{entry.name}" gets the defaults, without '
            "SystemdCgroup"
        )
    if version == 1 or not engine.drop_in:
        target = edited(
            engine.config,
            "toml",
            lambda document: _in_place(document, entry, version, cri),
            lambda document: containerd_document.remove(document, entry.name),
        )
        return FileSet([target], notes)
    engine = _read_last(engine, main, version)
    before, after = containerd_imports.around(main, engine.config, engine.drop_in)
    notes += [
        f'"{path}" is read after "{engine.drop_in}": a containerd before 2.1 takes all settings '
        "of the CRI plugin from the last file, and ignores ours"
        for path in after
        if _has_cri(path, version)
    ]
    effective = cri if source is not None else _effective_cri(cri, version, before)
    return FileSet(
        [
            drop_in(
                engine.drop_in,
                containerd_document.shared_settings(effective, version, cri),
                lambda document: containerd_document.configure(
                    document, entry, version, effective, cri
                ),
                lambda document: containerd_document.remove(document, entry.name),
            ),
            edited(
                engine.config,
                "toml",
                lambda document: containerd_imports.added(
                    document, engine.config, engine.drop_in, version
                ),
                lambda document: containerd_imports.removed(document, engine.drop_in),
                lambda gone: containerd_imports.is_needed(engine.drop_in, gone),
            ),
        ],
        notes,
    )


def _in_place(
    document: Mapping[str, Any], entry: RuntimeEntry, version: int, cri: Mapping[str, Any]
) -> list[Edit]:
    """Return the edits of a config *document* that is edited itself, without a drop-in."""
    version = containerd_document.version_of(document) if document else version
    own = containerd_document.cri_settings(document, version)
    return [
        *containerd_document.with_runc(document, version),
        *containerd_document.configure(document, entry, version, own, cri),
    ]


def _read_last(engine: EngineConfig, main: Mapping[str, Any], version: int) -> EngineConfig:
    """Return *engine* with its last drop-in if other files would be read after the usual one.

    An existing last drop-in is used even if there are no such files any more.
    """
    _, after = containerd_imports.around(main, engine.config, engine.drop_in)
    has_rival = any(_has_cri(path, version) for path in after if path != engine.last)
    if engine.last and (os.path.exists(engine.last) or has_rival):
        return dataclasses.replace(engine, drop_in=engine.last)
    return engine


def _new_version(socket: str) -> int:
    """Return the config version of a new file for the containerd at *socket*."""
    major = containerd_socket.major_version(socket) if socket else None
    return containerd_document.NEW_VERSION if major is None or major < 2 else 3


def _has_cri(path: str, version: int) -> bool:
    cri, _ = containerd_imports.cri_of(path, version)
    return bool(cri)


def _effective_cri(cri: Mapping[str, Any], version: int, before: list[str]) -> dict[str, Any]:
    """Return the settings in force: those of the last file of *before* that has any, else *cri*.

    Raises ConfigError for a file of another version, which has the settings under another key.
    """
    for path in reversed(before):
        imported, own = containerd_imports.cri_of(path, version)
        if imported:
            if own != version:
                raise ConfigError(
                    f'"{path}" has another version than the file that imports it',
                    "write both in one version",
                )
            return imported
    return dict(cri)
