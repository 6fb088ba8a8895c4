# SPDX-License-Identifier: Apache-2.0
"""docker's daemon.json; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuruntime.engines.edits import Edit, look_up, table_at
from gpuruntime.engines.entry import Entry

RUNTIMES = "runtimes"
DEFAULT = "default-runtime"


def configure(document: Mapping[str, Any], entry: Entry) -> list[Edit]:
    """Return the edits that make *entry* known; raise BadFileError if *document* is in the way."""
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
    """Return the edits that take the runtime *name* out."""
    runtimes = table_at(document, (RUNTIMES,))
    if name not in runtimes:
        return []
    edits: list[Edit] = [((RUNTIMES,) if len(runtimes) == 1 else (RUNTIMES, name), None)]
    if look_up(document, (DEFAULT,)) == name:
        edits.append(((DEFAULT,), "runc"))
    return edits
