# SPDX-License-Identifier: Apache-2.0
"""The config files of an engine, each with the edits that register a runtime and remove it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gpuruntime.engines import document_edits, files, toml_render, toml_text
from gpuruntime.engines.document_edits import EMPTY, Edit, Kind, look_up, put
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import Registration
from gpuruntime.formats import toml_source

Make = Callable[[str | None], str | None]


def _unchanged(text: str | None) -> str | None:
    return text


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file and its edits.

    *configure* adds the runtime; *remove* removes it without a record of the original.
    *is_generated*: each configure generates the whole file again, and keeps what other people have
    written into it. *is_needed* returns whether other files still depend on our edits after the
    removal of the files in its argument. *registrations* are those that *configure* makes, or that
    an undo removes; *configure_for* returns the edit that makes another registration.
    """

    path: str
    kind: Kind
    configure: Make
    remove: Make
    is_generated: bool = False
    is_needed: Callable[[Collection[str]], bool] = lambda _gone: False
    registrations: tuple[Registration, ...] = ()
    configure_for: Callable[[Registration], Make] = lambda _registration: _unchanged


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files to edit, and notes for the user."""

    files: list[ConfigFile]
    notes: list[str]


def whole(path: str, text: str) -> ConfigFile:
    """Return the file *path*, whose whole content is *text*."""
    return ConfigFile(path, "text", lambda _: text, lambda now: None if now == text else now)


def edited(
    path: str,
    kind: Kind,
    configure: Callable[[Mapping[str, Any]], list[Edit]],
    remove: Callable[[Mapping[str, Any]], list[Edit]],
    is_needed: Callable[[Collection[str]], bool] = lambda _gone: False,
) -> ConfigFile:
    """Return the file *path*, edited in place."""

    def make(text: str | None) -> str:
        text = EMPTY[kind] if text is None else text
        return document_edits.apply(kind, text, configure(document_edits.parse(kind, text)))

    def unmake(text: str | None) -> str | None:
        text = text or ""
        return document_edits.apply(kind, text, remove(document_edits.parse(kind, text)))

    return ConfigFile(path, kind, make, unmake, is_needed=is_needed)


def drop_in(
    path: str,
    base: Mapping[str, Any],
    configure: Callable[[Mapping[str, Any]], list[Edit]],
    remove: Callable[[Mapping[str, Any]], list[Edit]],
) -> ConfigFile:
    """Return the drop-in *path*: the settings *base*, which all its runtimes share, and ours.

    Settings that other people have written into the file are kept.
    """

    def make(text: str | None) -> str:
        document = toml_text.parse(text or "")
        if not document:
            fresh: dict[str, Any] = copy.deepcopy(dict(base))
            for edit_path, value in configure(fresh):
                put(fresh, edit_path, value)
            return toml_render.render(toml_source.without_empty(fresh)) + (text or "")
        missing = [edit for edit in _leaves((), base) if look_up(document, edit[0]) is None]
        text = document_edits.apply("toml", text or "", missing)
        return document_edits.apply("toml", text, configure(toml_text.parse(text)))

    def unmake(text: str | None) -> str | None:
        text = text or ""
        edits = remove(toml_text.parse(text))
        if not edits:
            return text
        text = document_edits.apply("toml", text, edits)
        left = toml_source.without_empty(toml_text.parse(text))
        return None if not left.keys() - {"version"} else text

    return ConfigFile(path, "toml", make, unmake, is_generated=True)


def _leaves(path: document_edits.Path, table: Mapping[str, Any]) -> list[Edit]:
    edits: list[Edit] = []
    for key, value in table.items():
        if isinstance(value, dict):
            edits += _leaves((*path, key), value)
        else:
            edits.append(((*path, key), value))
    return edits


def load_toml(path: str) -> dict[str, Any]:
    """Return the TOML document in the file *path*, empty if there is none; raise ConfigError."""
    try:
        return toml_text.parse(files.read(path) or "")
    except BadFileError as error:
        raise error.of(path) from error


def drop_ins(directory: str, suffix: str, *, has_subdirectories: bool) -> list[str]:
    """Return the files in *directory* that end with *suffix*, in the order of Go's filepath.Walk.

    Hidden files are included; the files of a subdirectory are sorted by the subdirectory's name.
    """
    paths: list[str] = []
    for top, subdirectories, names in os.walk(directory):
        paths += [os.path.join(top, name) for name in names if name.endswith(suffix)]
        if not has_subdirectories:
            subdirectories.clear()
    return sorted(filter(os.path.isfile, paths), key=lambda path: path.split("/"))


def earlier_drop_ins(drop_in: str, suffix: str, *, has_subdirectories: bool) -> list[str]:
    """Return the files that the engine reads before *drop_in*, in order."""
    paths = drop_ins(os.path.dirname(drop_in), suffix, has_subdirectories=has_subdirectories)
    return [path for path in paths if path.split("/") < drop_in.split("/")]
