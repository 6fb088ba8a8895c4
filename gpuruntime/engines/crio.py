# SPDX-License-Identifier: Apache-2.0
"""CRI-O's crio.conf and its drop-ins, which it merges key by key."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from gpuruntime.engines import toml_text
from gpuruntime.engines.config_files import (
    FileSet,
    drop_in,
    earlier_drop_ins,
    edited,
    load_toml,
)
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.document_edits import Edit, Path, check_spelling, look_up, table_at
from gpuruntime.engines.runtime_entry import RuntimeEntry, candidates

RUNTIME = ("crio", "runtime")
RUNTIMES = (*RUNTIME, "runtimes")
DEFAULT = (*RUNTIME, "default_runtime")


def configure(
    document: Mapping[str, Any], entry: RuntimeEntry, source: Mapping[str, Any]
) -> list[Edit]:
    """Return the edits that register *entry* in *document*.

    Its options are copied from a runtime of *source*, the config in force. Raises BadFileError if
    a value that must be a table is not one.
    """
    check_spelling(document, (RUNTIMES, DEFAULT))
    table_at(document, RUNTIMES)
    runtimes = table_at(source, RUNTIMES)
    names = candidates(look_up(source, DEFAULT), entry.name)
    tables = [runtimes[name] for name in names if isinstance(runtimes.get(name), dict)]
    # A runtime that runs the same program is ours under another name and is not copied.
    copied: dict[str, Any] = next(
        (table for table in tables if table.get("runtime_path") != entry.path), {}
    )
    table = copy.deepcopy(copied)
    table["runtime_path"] = entry.path
    table["runtime_type"] = "oci"
    edits: list[Edit] = []
    if entry.is_default:
        edits.append((DEFAULT, entry.name))
    elif look_up(document, DEFAULT) == entry.name:
        edits.append((DEFAULT, None))
    edits.append(((*RUNTIMES, entry.name), table))
    return edits


def remove(document: Mapping[str, Any], name: str) -> list[Edit]:
    """Return the edits that remove the runtime *name*."""
    runtimes = table_at(document, RUNTIMES)
    edits: list[Edit] = []
    if look_up(document, DEFAULT) == name:
        edits.append((DEFAULT, None))
    if name in runtimes:
        edits.append((RUNTIMES if len(runtimes) == 1 else (*RUNTIMES, name), None))
    return edits


def merge(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return *documents* merged: a later key wins, and each runtime is replaced as a whole."""
    merged: dict[str, Any] = {}
    for document in documents:
        check_spelling(document, (RUNTIMES, DEFAULT))
        _merge_into(merged, document, ())
    return merged


def _merge_into(merged: dict[str, Any], document: Mapping[str, Any], path: Path) -> None:
    for key, value in document.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict) and path != RUNTIMES:
            _merge_into(merged[key], value, (*path, key))
        else:
            merged[key] = copy.deepcopy(value)


def files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    """Return the files of *engine* for *entry*; raise ConfigError or BadFileError.

    *source* is the config that CRI-O prints; None: the config files are read.
    """
    notes = ["CRI-O's CDI is always on: --cdi.enabled changes nothing"] if entry.has_cdi else []
    if source is not None:
        effective_document = toml_text.parse(source)
    else:
        paths = [engine.config]
        if engine.drop_in:
            paths += earlier_drop_ins(engine.drop_in, "", has_subdirectories=True)
        effective_document = merge([load_toml(path) for path in paths])

    def without(document: Mapping[str, Any]) -> list[Edit]:
        return remove(document, entry.name)

    if not engine.drop_in:
        target = edited(
            engine.config,
            "toml",
            lambda document: configure(document, entry, effective_document),
            without,
        )
        return FileSet([target], notes)
    return FileSet(
        [
            drop_in(
                engine.drop_in,
                {},
                lambda document: configure(document, entry, effective_document),
                without,
            )
        ],
        notes,
    )
