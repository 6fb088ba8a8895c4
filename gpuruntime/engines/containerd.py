# SPDX-License-Identifier: Apache-2.0
"""The config files of containerd and MicroK8s, which import others, and how each is changed."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import os
from collections.abc import Mapping
from typing import Any

from gpuruntime.engines import containerd_document, containerd_socket, files, toml_text
from gpuruntime.engines.config_files import FileSet, drop_in, edited
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.document_edits import Edit, table_at
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.errors import ConfigError


def files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    """Return the files of *engine*, a containerd or a MicroK8s; may raise BadFileError.

    *source* is the config as the program prints it, None for that of the file.
    """
    text = files.read(engine.config)
    if text is None and engine.name == "microk8s":
        # Nothing but what microk8s has put there is a template.
        raise ConfigError(f'there is no "{engine.config}"', "install microk8s first")
    main = toml_text.parse(text or "")
    version = containerd_document.version_of(main) if main else _new_version(engine.socket)
    known = main
    if source is not None and (version > 1 or not main):
        known = toml_text.parse(source)
        version = containerd_document.version_of(known)
        if main and containerd_document.version_of(main) > version:
            raise ConfigError(
                f'"{engine.config}" has version {containerd_document.version_of(main)}, but the '
                f"containerd that was asked has version {version}: it is another one",
                'name its program with "--executable-path", or use "--config-source file"',
            )
    cri = table_at(known, containerd_document.plugin_path(version))
    notes = []
    if containerd_document.is_cri_disabled(main):
        notes.append(
            f'"{engine.config}" turns the CRI plugin off by "disabled_plugins": Kubernetes gets '
            "no runtime from this containerd"
        )
    if containerd_document.runtime_to_copy(cri, entry) is None and not entry.has_systemd_cgroup:
        notes.append(
            f'no runtime to take options from: "{entry.name}" has the defaults, without '
            "SystemdCgroup"
        )
    if version == 1 or not engine.drop_in:
        target = edited(
            engine.config,
            "toml",
            lambda document: containerd_document.configure(
                document,
                entry,
                containerd_document.version_of(document) if document else version,
                cri,
            ),
            lambda document: containerd_document.remove(document, entry.name),
        )
        return FileSet([target], notes)
    engine = _read_last(engine, main)
    before, after = imported(main, engine.config, engine.drop_in)
    notes += [
        f'"{path}" is read after "{engine.drop_in}": a containerd before 2.1 takes all settings '
        "of the CRI plugin from the last file, and forgets ours"
        for path in after
        if has_cri(path)
    ]
    effective = cri if source is not None else effective_cri(cri, version, before)
    return FileSet(
        [
            drop_in(
                engine.drop_in,
                containerd_document.shared_settings(effective, version),
                lambda document: containerd_document.configure(document, entry, version, cri),
                lambda document: containerd_document.remove(document, entry.name),
            ),
            edited(
                engine.config,
                "toml",
                lambda document: imports(document, engine.config, engine.drop_in, version),
                lambda document: _without_import(document, engine.drop_in),
                lambda gone: bool(set(glob.glob(import_of(engine.drop_in))).difference(gone)),
            ),
        ],
        notes,
    )


def _read_last(engine: EngineConfig, main: Mapping[str, Any]) -> EngineConfig:
    """Return *engine* with the other drop-in if the usual one would be read before somebody's.

    Once that is there it stays, whatever becomes of those.
    """
    _, after = imported(main, engine.config, engine.drop_in)
    others = [path for path in after if path != engine.last]
    if engine.last and (os.path.exists(engine.last) or any(map(has_cri, others))):
        return dataclasses.replace(engine, drop_in=engine.last)
    return engine


def _new_version(socket: str) -> int:
    """Return the version that a new config is to have for the containerd at *socket*."""
    major = containerd_socket.major_version(socket) if socket else None
    return containerd_document.NEW_VERSION if major is None or major < 2 else 3


def _without_import(document: Mapping[str, Any], target: str) -> list[Edit]:
    """Return the edits by which the drop-in *target* is no longer imported, if it is the only."""
    pattern = import_of(target)
    known = document.get("imports", [])
    others = [path for path in glob.glob(pattern) if path != target]
    if not isinstance(known, list) or pattern not in known or others:
        return []
    kept = [item for item in known if item != pattern]
    found: list[Edit] = [(("imports",), kept or None)]
    if not document.keys() - {"imports", "version"} and not kept:
        found.append((("version",), None))
    return found


def imports(document: Mapping[str, Any], path: str, target: str, version: int) -> list[Edit]:
    """Return the edits of the main file *path* by which it imports the drop-in *target*.

    *version* is for a file that says nothing.
    """
    known = document.get("imports", [])
    if not isinstance(known, list) or not all(isinstance(item, str) for item in known):
        raise BadFileError("has imports that are no list of strings", "correct it")
    found: list[Edit] = []
    if not any(_is_match(pattern, target) for pattern in _patterns(document, path)):
        found.append((("imports",), [*known, import_of(target)]))
    if not document:
        found.append((("version",), version))
    return found


def import_of(target: str) -> str:
    """Return the pattern by which the drop-in *target* is imported."""
    return os.path.join(os.path.dirname(target), "*.toml")


def imported(document: Mapping[str, Any], path: str, target: str) -> tuple[list[str], list[str]]:
    """Return the files that the main file *path* imports before, and those after *target*."""
    before: list[str] = []
    after: list[str] = []
    is_after = False
    for pattern in _patterns(document, path):
        names = set(glob.glob(pattern))
        if _is_match(pattern, target):
            names.add(target)
        for name in sorted(names):
            if name == target:
                is_after = True
            elif name not in before and name not in after:
                (after if is_after else before).append(name)
    return before, after


def has_cri(path: str) -> bool:
    """Return whether the file *path* has settings of the CRI plugin, in any version."""
    return bool(_cri_of(path))


def _cri_of(path: str) -> dict[str, Any]:
    try:
        document = toml_text.parse(files.read(path) or "")
        return table_at(
            document, containerd_document.plugin_path(containerd_document.version_of(document))
        )
    except BadFileError as error:
        raise error.of(path) from error


def effective_cri(cri: Mapping[str, Any], version: int, before: list[str]) -> dict[str, Any]:
    """Return the settings in force: those of the last file that has any, *cri* being the first.

    Raises ConfigError for a file of another version, which says the same under another name.
    """
    for path in reversed(before):
        found = _cri_of(path)
        if found:
            if containerd_document.version_of(toml_text.parse(files.read(path) or "")) != version:
                raise ConfigError(
                    f'"{path}" has another version than the file that imports it',
                    "write both in one version",
                )
            return found
    return dict(cri)


def _patterns(document: Mapping[str, Any], path: str) -> list[str]:
    """Return what the main file *path* imports, as absolute patterns.

    Before 2.0 containerd takes a relative pattern as one of its working directory, a relative name
    as one beside the file.
    """
    directory = os.path.dirname(os.path.abspath(path))
    has_old_rule = containerd_document.version_of(document) < 3
    return [
        os.path.normpath(os.path.join(directory, pattern))
        for pattern in document.get("imports", [])
        if pattern.startswith("/") or "*" not in pattern or not has_old_rule
    ]


def _is_match(pattern: str, path: str) -> bool:
    """Return whether the glob *pattern* names *path*; its wildcards do not stand for a slash."""
    wanted, parts = pattern.split("/"), path.split("/")
    return len(wanted) == len(parts) and all(
        fnmatch.fnmatchcase(part, glob_) for part, glob_ in zip(parts, wanted, strict=True)
    )
