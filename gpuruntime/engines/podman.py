# SPDX-License-Identifier: Apache-2.0
"""podman's containers.conf and its drop-ins; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuruntime.engines.edits import Edit, look_up, table_at
from gpuruntime.engines.entry import Entry
from gpuruntime.engines.errors import BadFileError

RUNTIME = ("engine", "runtime")
RUNTIMES = ("engine", "runtimes")
# A list replaces the one before it, also podman's own: ours must begin with that.
JSON = ("engine", "runtime_supports_json")
_DEFAULT_JSON = ["crun", "runc", "kata", "runsc", "youki", "krun"]


def configure(
    document: Mapping[str, Any], entry: Entry, known: list[Any] | None = None
) -> list[Edit]:
    """Return the edits of *document* that make *entry* known, and read its errors as JSON.

    *known* are the runtimes that do so by what podman reads before *document*. Raises
    BadFileError if something else is where a table or a list must be.
    """
    table_at(document, RUNTIMES)
    names = look_up(document, JSON)
    if names is None:
        names = _DEFAULT_JSON if known is None else known
    if not isinstance(names, list):
        raise BadFileError(f'has "{".".join(JSON)}", which is no list', "correct it")
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
