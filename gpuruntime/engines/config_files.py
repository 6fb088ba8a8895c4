# SPDX-License-Identifier: Apache-2.0
"""The config files of an engine, each with the edit that its present content gets."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuruntime.engines import document_edits, files, toml_text
from gpuruntime.engines.document_edits import EMPTY, Edit, Kind
from gpuruntime.engines.errors import BadFileError
from gpuruntime.formats import toml_source

Make = Callable[[str | None], str | None]


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file, and the edit that its present content gets.

    *configure* adds the runtime, *remove* takes it out without knowing what was before. *is_ours*:
    the file is made anew each time, of what others have in it.
    """

    path: str
    kind: Kind
    configure: Make
    remove: Make
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files to be made, and what the user should know besides."""

    files: list[ConfigFile]
    notes: list[str]


def whole(path: str, text: str) -> ConfigFile:
    """Return the file *path* as one that is *text*, all of it."""
    return ConfigFile(path, "text", lambda _: text, lambda now: None if now == text else now)


def edited(
    path: str,
    kind: Kind,
    configure: Callable[[Mapping[str, Any]], list[Edit]],
    remove: Callable[[Mapping[str, Any]], list[Edit]],
) -> ConfigFile:
    """Return the file *path* as one that is edited where it is."""

    def make(text: str | None) -> str:
        text = EMPTY[kind] if text is None else text
        return document_edits.apply(kind, text, configure(document_edits.parse(kind, text)))

    def unmake(text: str | None) -> str | None:
        text = text or ""
        return document_edits.apply(kind, text, remove(document_edits.parse(kind, text)))

    return ConfigFile(path, kind, make, unmake)


def drop_in(
    path: str, fresh: str, remove: Callable[[Mapping[str, Any]], list[Edit]]
) -> ConfigFile:
    """Return the file *path* as one that is *fresh*, with what others have put into it."""

    def make(text: str | None) -> str:
        if text is None or not toml_text.parse(text):
            return fresh + (text or "")
        return document_edits.apply("toml", text, list(_leaves((), toml_text.parse(fresh))))

    def unmake(text: str | None) -> str | None:
        text = text or ""
        document = toml_text.parse(text)
        text = document_edits.apply("toml", text, remove(document))
        left = toml_source.without_empty(toml_text.parse(text))
        return None if not left.keys() - {"version"} else text

    return ConfigFile(path, "toml", make, unmake, is_ours=True)


def _leaves(path: document_edits.Path, table: Mapping[str, Any]) -> list[Edit]:
    found: list[Edit] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _leaves((*path, key), value)
        else:
            found.append(((*path, key), value))
    return found


def load_toml(path: str) -> dict[str, Any]:
    """Return the TOML document in the file *path*, empty if there is none; raise ConfigError."""
    try:
        return toml_text.parse(files.read(path) or "")
    except BadFileError as error:
        raise error.of(path) from error


def earlier_drop_ins(drop_in: str, pattern: str) -> list[str]:
    """Return the files that are read before *drop_in*, in order."""
    if not drop_in:
        return []
    directory = os.path.dirname(drop_in)
    found = sorted(glob.glob(os.path.join(glob.escape(directory), pattern)))
    return [path for path in found if path < drop_in and os.path.isfile(path)]
