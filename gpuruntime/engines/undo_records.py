# SPDX-License-Identifier: Apache-2.0
"""Records of config files as they were before us, so that an undo restores every byte.

They are not beside the files, because CRI-O reads every name in its directory; nor are they
comments, because JSON has none.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass

from gpuruntime.engines import files
from gpuruntime.errors import ConfigError
from gpuruntime.trusted_files import may_trust

FORMAT = 1
DIRECTORY = "/var/lib/gpuruntime/engines"


@dataclass(frozen=True, slots=True)
class UndoRecord:
    """Of the file *path*: its text before us (None: no file), and as we have left it.

    *directories* are those that we have made for it.
    """

    path: str
    original: str | None
    written: str
    directories: tuple[str, ...] = ()


def default_directory(environ: dict[str, str], uid: int) -> str:
    """Return where the records of the user *uid* are kept."""
    if uid == 0:
        return DIRECTORY
    home = environ.get("HOME", "/")
    state = environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
    return os.path.join(state, "gpuruntime", "engines")


def load(directory: str, path: str) -> UndoRecord | None:
    """Return the record of the file *path*, None if there is none; raise ConfigError if broken."""
    name = _name(directory, path)
    if os.path.isdir(directory) and not may_trust(os.stat(directory)):
        # What a record says was before is what an undo writes.
        raise ConfigError(
            f'others may write to "{directory}"', 'name another directory with "--state-dir"'
        )
    try:
        text = files.read(name)
    except ConfigError as error:
        raise ConfigError(error.message, 'name another directory with "--state-dir"') from error
    if text is None:
        return None
    try:
        found = json.loads(text)
        record = UndoRecord(
            found["path"], found["original"], found["written"], tuple(found["directories"])
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f'"{name}" is no record of ours', "remove it") from error
    if found.get("format") != FORMAT or record.path != files.resolve(path):
        raise ConfigError(f'"{name}" is no record of "{path}"', "remove it")
    return record


def store(directory: str, record: UndoRecord) -> None:
    """Keep *record*; raise ConfigError if that cannot be."""
    document = {
        "format": FORMAT,
        "path": record.path,
        "original": record.original,
        "written": record.written,
        "directories": list(record.directories),
    }
    name = _name(directory, record.path)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # A config can hold the passwords of registries.
        files.replace(name, json.dumps(document, indent=2) + "\n", 0o600)
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f'cannot keep "{record.path}" as it was in "{directory}": {error}',
            'name another directory with "--state-dir"',
        ) from error


def forget(directory: str, path: str) -> None:
    """Remove the record of the file *path*, if there is one, and the directory after the last."""
    directories = [directory]
    if os.path.basename(os.path.dirname(directory)) == "gpuruntime":
        directories.append(os.path.dirname(directory))
    files.remove(_name(directory, path), directories)


def _name(directory: str, path: str) -> str:
    digest = hashlib.sha256(os.fsencode(files.resolve(path))).hexdigest()
    return os.path.join(directory, f"{digest[:32]}.json")
