# SPDX-License-Identifier: Apache-2.0
"""podman's containers.conf and its drop-ins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuruntime.engines.config_files import (
    FileSet,
    drop_in,
    drop_ins,
    earlier_drop_ins,
    edited,
    load_toml,
)
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.document_edits import Edit, check_spelling, look_up, put, table_at
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import RuntimeEntry

SYSTEM = "/etc/containers/containers.conf"
DEFAULTS = "/usr/share/containers/containers.conf"
RUNTIME = ("engine", "runtime")
RUNTIMES = ("engine", "runtimes")
# A list replaces the one before it, also podman's own: ours must begin with that.
JSON = ("engine", "runtime_supports_json")
_DEFAULT_JSON = ["crun", "runc", "kata", "runsc", "youki", "krun"]


def configure(
    document: Mapping[str, Any], entry: RuntimeEntry, known: list[Any] | None = None
) -> list[Edit]:
    """Return the edits of *document* that make *entry* known, and read its errors as JSON.

    *known* are the runtimes that do so by what podman reads before *document*. Raises
    BadFileError if something else is where a table or a list must be.
    """
    check_spelling(document, (RUNTIME, RUNTIMES, JSON))
    table_at(document, RUNTIMES)
    names = look_up(document, JSON)
    if names is None:
        names = _DEFAULT_JSON if known is None else known
    if not isinstance(names, list):
        raise BadFileError(f'has "{".".join(JSON)}", which is not a list', "correct it")
    edits: list[Edit] = []
    if entry.is_default:
        edits.append((RUNTIME, entry.name))
    elif look_up(document, RUNTIME) == entry.name:
        edits.append((RUNTIME, None))
    if entry.name not in names:
        # A table at the end says how the list is meant.
        count = len(names) - (bool(names) and isinstance(names[-1], dict))
        edits.append((JSON, [*names[:count], entry.name, *names[count:]]))
    edits.append(((*RUNTIMES, entry.name), [entry.path]))
    return edits


def remove(document: Mapping[str, Any], name: str) -> list[Edit]:
    """Return the edits that take the runtime *name* out."""
    runtimes = table_at(document, RUNTIMES)
    names = look_up(document, JSON)
    edits: list[Edit] = []
    if look_up(document, RUNTIME) == name:
        edits.append((RUNTIME, None))
    if isinstance(names, list) and name in names:
        edits.append((JSON, [item for item in names if item != name]))
    if name in runtimes:
        edits.append((RUNTIMES if len(runtimes) == 1 else (*RUNTIMES, name), None))
    return edits


def _read_before(engine: EngineConfig) -> list[str]:
    """Return the files that podman reads before the one that we write."""
    if not engine.drop_in:
        return [DEFAULTS]
    paths = [DEFAULTS]
    if engine.config != SYSTEM:
        # A user's files come after those of the system.
        paths += [SYSTEM, *drop_ins(f"{SYSTEM}.d", ".conf", has_subdirectories=False)]
    earlier = earlier_drop_ins(engine.drop_in, ".conf", has_subdirectories=False)
    return [*paths, engine.config, *earlier]


def files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    """Return the files of *engine* for *entry*; raise ConfigError or BadFileError."""
    del source
    notes = ["podman's CDI is always on: --cdi.enabled changes nothing"] if entry.has_cdi else []

    def without(document: Mapping[str, Any]) -> list[Edit]:
        return remove(document, entry.name)

    known: list[Any] | None = None
    for path in _read_before(engine):
        document = load_toml(path)
        check_spelling(document, (JSON,))
        names = look_up(document, JSON)
        known = names if isinstance(names, list) else known
    if not engine.drop_in:
        target = edited(
            engine.config, "toml", lambda document: configure(document, entry, known), without
        )
        return FileSet([target], notes)
    base: dict[str, Any] = {}
    put(base, JSON, _DEFAULT_JSON if known is None else known)
    return FileSet(
        [
            drop_in(
                engine.drop_in, base, lambda document: configure(document, entry, known), without
            )
        ],
        notes,
    )
