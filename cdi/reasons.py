# SPDX-License-Identifier: Apache-2.0
"""Explain why a qualified name does not resolve; pure. Engines only report that it does not."""

from __future__ import annotations

import difflib

from cdi import names
from cdi.errors import CdiError
from cdi.registry import Registry

MAX_SUGGESTIONS = 8
# The search for similar names takes time for each candidate.
MAX_COMPARED = 1000


def why_unresolved(registry: Registry, name: str) -> str:
    """Return the reason why *registry* does not resolve *name*, in one line."""
    files = registry.defining(name)
    if files:
        rivals = [f for f in files if sum(g.priority == f.priority for g in files) > 1]
        where = ", ".join(f'"{file.path}"' for file in rivals)
        return f"defined more than once in one directory: {where}"
    try:
        names.parse_qualified(name)
    except CdiError as error:
        return f"not a qualified device name: {error.message}"
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


def _some(name: str, candidates: list[str]) -> str:
    """Return a few of *candidates*, those similar to *name* first."""
    if len(candidates) <= MAX_SUGGESTIONS:
        return ", ".join(candidates)
    near = difflib.get_close_matches(name, candidates[:MAX_COMPARED], MAX_SUGGESTIONS, 0.8)
    shown = list(dict.fromkeys([*near, *candidates]))[:MAX_SUGGESTIONS]
    return f"{', '.join(shown)} and {len(candidates) - len(shown)} more"
