# SPDX-License-Identifier: Apache-2.0
"""The files that containerd's config imports, in the order in which containerd reads them.

An imported file can import others, which are read after all files that the first one imports.
Only an import with "*" is a pattern.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from gpuruntime.engines import containerd_document, files, go_glob, toml_text
from gpuruntime.engines.document_edits import Edit
from gpuruntime.engines.errors import BadFileError


def import_of(drop_in: str) -> str:
    """Return the import of *drop_in*: a pattern for its directory if possible, else its path."""
    directory = os.path.dirname(drop_in)
    if not drop_in.endswith(".toml") or go_glob.has_wildcards(directory):
        return drop_in
    return os.path.join(directory, "*.toml")


def added(document: Mapping[str, Any], path: str, drop_in: str, version: int) -> list[Edit]:
    """Return the edits that make the config file *path* import *drop_in*.

    *version* is that of a new file. Raises BadFileError.
    """
    edits: list[Edit] = []
    if not _is_imported(document, path, drop_in):
        edits.append((("imports",), [*_listed(document), import_of(drop_in)]))
    if not document:
        edits.append((("version",), version))
    return edits


def removed(document: Mapping[str, Any], drop_in: str) -> list[Edit]:
    """Return the edits that remove the import of *drop_in*, none if it imports other files too."""
    pattern = import_of(drop_in)
    listed = document.get("imports", [])
    if not isinstance(listed, list) or pattern not in listed or is_needed(drop_in, (drop_in,)):
        return []
    others = [item for item in listed if item != pattern]
    edits: list[Edit] = [(("imports",), others or None)]
    if not document.keys() - {"imports", "version"} and not others:
        edits.append((("version",), None))
    return edits


def is_needed(drop_in: str, gone: Collection[str]) -> bool:
    """Return whether the import of *drop_in* still matches files that are not in *gone*."""
    pattern = import_of(drop_in)
    return "*" in pattern and any(path not in gone for path in go_glob.paths(pattern))


def around(document: Mapping[str, Any], path: str, drop_in: str) -> tuple[list[str], list[str]]:
    """Return the files that are read before *drop_in*, and those that are read after it.

    *document* is the config file *path*, which will import *drop_in*. Raises BadFileError, and
    ConfigError for an imported file.
    """
    first = _listed(document)
    if not _is_imported(document, path, drop_in):
        first = [*first, import_of(drop_in)]
    version = containerd_document.version_of(document)
    order: list[str] = []
    pending = _resolved(first, path, drop_in, version)
    while pending:
        name = pending.pop(0)
        if name in order or name == path:
            continue
        order.append(name)
        if name != drop_in:
            pending += _imports_of(name, drop_in, version)
    at = order.index(drop_in) if drop_in in order else len(order)
    return order[:at], order[at + 1 :]


def cri_of(path: str, version: int) -> tuple[dict[str, Any], int]:
    """Return the CRI plugin's settings in the imported file *path*, and the file's version.

    A file without a version has the *version* of the file that imports it. Raises ConfigError.
    """
    try:
        document = toml_text.parse(files.read(path) or "")
        own = containerd_document.version_of(document) if "version" in document else version
        return containerd_document.cri_settings(document, own), own
    except BadFileError as error:
        raise error.of(path) from error


def _is_imported(document: Mapping[str, Any], path: str, drop_in: str) -> bool:
    version = containerd_document.version_of(document)
    return any(
        go_glob.is_match(pattern, drop_in) if "*" in pattern else pattern == drop_in
        for pattern in _absolute(_listed(document), path, version)
    )


def _imports_of(path: str, drop_in: str, version: int) -> list[str]:
    try:
        document = toml_text.parse(files.read(path) or "")
        return _resolved(_listed(document), path, drop_in, version)
    except BadFileError as error:
        raise error.of(path) from error


def _listed(document: Mapping[str, Any]) -> list[str]:
    listed = document.get("imports", [])
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise BadFileError('has "imports", which is not a list of strings', "correct it")
    for item in listed:
        try:
            go_glob.check(item if "*" in item else "")
        except ValueError as error:
            raise BadFileError(
                f"has an import that is not valid: {error}", "correct it"
            ) from error
    return listed


def _absolute(listed: list[str], path: str, version: int) -> list[str]:
    """Return the imports of the file *path* as absolute paths and patterns.

    containerd before 2.0 resolves a relative path against the directory of the file, but a
    relative pattern against its working directory, which we do not know: such patterns are left
    out.
    """
    directory = os.path.dirname(os.path.abspath(path))
    return [
        os.path.normpath(os.path.join(directory, item))
        for item in listed
        if item.startswith("/") or "*" not in item or version >= 3
    ]


def _resolved(listed: list[str], path: str, drop_in: str, version: int) -> list[str]:
    """Return the files that the file *path* imports, as if *drop_in* already existed."""
    resolved = []
    for item in _absolute(listed, path, version):
        if "*" not in item:
            resolved.append(item)
            continue
        matches = go_glob.paths(item)
        if go_glob.is_match(item, drop_in):
            matches = sorted({*matches, drop_in})
        resolved += matches
    return resolved
