# SPDX-License-Identifier: Apache-2.0
"""The plan for an engine: its config files, each with how it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuruntime.engines import edits, toml_text
from gpuruntime.engines.edits import EMPTY, Edit, Kind
from gpuruntime.engines.work import Target
from gpuruntime.formats import toml_source


@dataclass(frozen=True, slots=True)
class Plan:
    """The files to be made, and what the user should know besides."""

    targets: list[Target]
    notes: list[str]


def whole(path: str, text: str) -> Target:
    """Return the file *path* as one that is *text*, all of it."""
    return Target(path, "text", lambda _: text, lambda now: None if now == text else now)


def edited(
    path: str,
    kind: Kind,
    configure: Callable[[Mapping[str, Any]], list[Edit]],
    remove: Callable[[Mapping[str, Any]], list[Edit]],
) -> Target:
    """Return the file *path* as one that is edited where it is."""

    def make(text: str | None) -> str:
        text = EMPTY[kind] if text is None else text
        return edits.apply(kind, text, configure(edits.parse(kind, text)))

    def unmake(text: str | None) -> str | None:
        text = text or ""
        return edits.apply(kind, text, remove(edits.parse(kind, text)))

    return Target(path, kind, make, unmake)


def drop_in(path: str, fresh: str, remove: Callable[[Mapping[str, Any]], list[Edit]]) -> Target:
    """Return the file *path* as one that is *fresh*, with what others have put into it."""

    def make(text: str | None) -> str:
        if text is None or not toml_text.parse(text):
            return fresh + (text or "")
        return edits.apply("toml", text, list(_leaves((), toml_text.parse(fresh))))

    def unmake(text: str | None) -> str | None:
        text = text or ""
        document = toml_text.parse(text)
        text = edits.apply("toml", text, remove(document))
        left = toml_source.without_empty(toml_text.parse(text))
        return None if not left.keys() - {"version"} else text

    return Target(path, "toml", make, unmake, is_ours=True)


def _leaves(path: edits.Path, table: Mapping[str, Any]) -> list[Edit]:
    found: list[Edit] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _leaves((*path, key), value)
        else:
            found.append(((*path, key), value))
    return found
