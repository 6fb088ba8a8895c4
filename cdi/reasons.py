# SPDX-License-Identifier: Apache-2.0
"""Explain why a qualified name does not resolve; pure. Engines only report that it does not."""

from __future__ import annotations

import difflib

from cdi import names
from cdi.errors import CdiError
from cdi.registry import Registry

MAX_SUGGESTIONS = 8
# Looking for similar names costs time for each that there is.
MAX_COMPARED = 1000


def why_unresolved(registry: Registry, name: str) -> str:
    """Return in one line why *registry* does not resolve *name*."""
    files = registry.defining(name)
    if files:
        rivals = [f for f in files if sum(g.priority == f.priority for g in files) > 1]
        where = ", ".join(f'"{file.path}"' for file in rivals)
        return f"defined more than once in one directory: {where}"
    try:
        names.parse_qualified(name)
    except CdiError as error:
        return f"no qualified device name: {error.message}"
    kind = name.partition("=")[0]
    of_kind = registry.names(kind)
    failed = [file.path for file in registry.files if file.error is not None]
    if of_kind:
        text = f'no spec defines it; of kind "{kind}" there are {_some(name, of_kind)}'
    elif registry.kinds:
        kinds = registry.kinds
        text = f'no spec is of kind "{kind}"; there are {_some(kind, kinds)}'
    else:
        text = f"no spec defines a device in {', '.join(registry.directories)}"
    if failed:
        text += f"; not loaded: {', '.join(failed[:MAX_SUGGESTIONS])}"
    return text


def _some(wanted: str, there: list[str]) -> str:
    """Return a few of *there*, those like *wanted* first."""
    if len(there) <= MAX_SUGGESTIONS:
        return ", ".join(there)
    near = difflib.get_close_matches(wanted, there[:MAX_COMPARED], MAX_SUGGESTIONS, 0.8)
    shown = list(dict.fromkeys([*near, *there]))[:MAX_SUGGESTIONS]
    return f"{', '.join(shown)} and {len(there) - len(shown)} more"
