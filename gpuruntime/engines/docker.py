# SPDX-License-Identifier: Apache-2.0
"""docker's daemon.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuruntime.engines import files, json_text
from gpuruntime.engines.config_files import FileSet, edited
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.document_edits import Edit, check_spelling, look_up, table_at
from gpuruntime.engines.runtime_entry import RuntimeEntry
from gpuruntime.errors import ConfigError

RUNTIMES = "runtimes"
DEFAULT = "default-runtime"


def configure(document: Mapping[str, Any], entry: RuntimeEntry) -> list[Edit]:
    """Return the edits that register *entry*; raise BadFileError if *document* is malformed."""
    check_spelling(document, ((RUNTIMES,), (DEFAULT,), ("features",)))
    table_at(document, (RUNTIMES,))
    edits: list[Edit] = []
    if entry.is_default:
        edits.append(((DEFAULT,), entry.name))
    if entry.has_cdi:
        table_at(document, ("features",))
        edits.append((("features", "cdi"), True))
    edits.append(((RUNTIMES, entry.name), {"args": [], "path": entry.path}))
    return edits


def remove(document: Mapping[str, Any], name: str) -> list[Edit]:
    """Return the edits that remove the runtime *name*."""
    runtimes = table_at(document, (RUNTIMES,))
    if name not in runtimes:
        return []
    edits: list[Edit] = [((RUNTIMES,) if len(runtimes) == 1 else (RUNTIMES, name), None)]
    if look_up(document, (DEFAULT,)) == name:
        edits.append(((DEFAULT,), "runc"))
    return edits


def files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    """Return the files of *engine* for *entry*; raise ConfigError or BadFileError."""
    del source
    if engine.drop_in:
        raise ConfigError("docker does not support drop-in configs", "omit --drop-in-config")
    notes = []
    if (files.read(engine.config) or "").startswith(json_text.BYTE_ORDER_MARK):
        notes.append(
            f'"{engine.config}" begins with a byte order mark: docker before 23.0 does not start '
            "with it"
        )
    return FileSet(
        [
            edited(
                engine.config,
                "json",
                lambda document: configure(document, entry),
                lambda document: remove(document, entry.name),
            )
        ],
        notes,
    )
