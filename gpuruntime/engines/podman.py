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
# A list replaces the earlier one and podman's default, so our list must begin with those items.
JSON = ("engine", "runtime_supports_json")
_DEFAULT_JSON = ["crun", "runc", "kata", "runsc", "youki", "krun"]


def configure(
    document: Mapping[str, Any], entry: RuntimeEntry, json_runtimes: list[Any] | None = None
) -> list[Edit]:
    """Return the edits that register *entry* in *document*, as a runtime with errors in JSON.

    *json_runtimes* are the runtimes with errors in JSON according to the files that podman reads
    before *document*. Raises BadFileError if a value that must be a table or a list is not one.
    """
    check_spelling(document, (RUNTIME, RUNTIMES, JSON))
    table_at(document, RUNTIMES)
    names = look_up(document, JSON)
    if names is None:
        names = _DEFAULT_JSON if json_runtimes is None else json_runtimes
    if not isinstance(names, list):
        raise BadFileError(f'has "{".".join(JSON)}", which is not a list', "correct it")
    edits: list[Edit] = []
    if entry.is_default:
        edits.append((RUNTIME, entry.name))
    elif look_up(document, RUNTIME) == entry.name:
        edits.append((RUNTIME, None))
    if entry.name not in names:
        # A table as the last item has the options of the list.
        count = len(names) - (bool(names) and isinstance(names[-1], dict))
        edits.append((JSON, [*names[:count], entry.name, *names[count:]]))
    edits.append(((*RUNTIMES, entry.name), [entry.path]))
    return edits


def remove(document: Mapping[str, Any], name: str) -> list[Edit]:
    """Return the edits that remove the runtime *name*."""
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
        # The files of a user are read after those of the system.
        paths += [SYSTEM, *drop_ins(f"{SYSTEM}.d", ".conf", has_subdirectories=False)]
    earlier = earlier_drop_ins(engine.drop_in, ".conf", has_subdirectories=False)
    return [*paths, engine.config, *earlier]


def files_of(engine: EngineConfig, entry: RuntimeEntry, source: str | None) -> FileSet:
    """Return the files of *engine* for *entry*; raise ConfigError or BadFileError."""
    del source
    notes = ["podman's CDI is always on: --cdi.enabled changes nothing"] if entry.has_cdi else []

    def without(document: Mapping[str, Any]) -> list[Edit]:
        return remove(document, entry.name)

    json_runtimes: list[Any] | None = None
    for path in _read_before(engine):
        document = load_toml(path)
        check_spelling(document, (JSON,))
        names = look_up(document, JSON)
        json_runtimes = names if isinstance(names, list) else json_runtimes
    if not engine.drop_in:
        target = edited(
            engine.config,
            "toml",
            lambda document: configure(document, entry, json_runtimes),
            without,
        )
        return FileSet([target], notes)
    base: dict[str, Any] = {}
    put(base, JSON, _DEFAULT_JSON if json_runtimes is None else json_runtimes)
    return FileSet(
        [
            drop_in(
                engine.drop_in,
                base,
                lambda document: configure(document, entry, json_runtimes),
                without,
            )
        ],
        notes,
    )
