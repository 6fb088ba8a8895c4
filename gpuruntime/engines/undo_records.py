# SPDX-License-Identifier: Apache-2.0
"""Records of the original config files, so that an undo restores every byte.

They are not stored beside the files, because CRI-O reads every file in its directory, nor as
comments, because JSON has none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from gpuruntime.engines import files
from gpuruntime.engines.runtime_entry import Registration, RuntimeEntry
from gpuruntime.errors import ConfigError
from gpuruntime.trusted_files import may_trust

FORMAT = 1
# A record contains a config file twice, and the output of the engine.
MAX_BYTES = 16 * files.MAX_BYTES
DIRECTORY = "/var/lib/gpuruntime/engines"


@dataclass(frozen=True, slots=True)
class UndoRecord:
    """The text of the file *path* without our edits (None: no file), and the text with them.

    *directories* are those that we have created for it, *runtimes* those that the edits register.
    """

    path: str
    original: str | None
    written: str
    directories: tuple[str, ...] = ()
    runtimes: tuple[Registration, ...] = ()


def default_directory(environ: dict[str, str], uid: int) -> str:
    """Return the directory of the records of the user *uid*."""
    if uid == 0:
        return DIRECTORY
    home = environ.get("HOME", "/")
    state = environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state")
    return os.path.join(state, "gpuruntime", "engines")


def load_all(directory: str) -> list[UndoRecord]:
    """Return the records in *directory* that can be read."""
    records = []
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        try:
            path = json.loads(files.read(os.path.join(directory, name), MAX_BYTES) or "")["path"]
            record = load(directory, path)
        except (ConfigError, ValueError, KeyError, TypeError, RecursionError):
            continue
        records += [record] if record else []
    return records


def load(directory: str, path: str) -> UndoRecord | None:
    """Return the record of the file *path*, None if it does not exist; raise ConfigError."""
    name = _name(directory, path)
    if os.path.isdir(directory) and not may_trust(os.stat(directory)):
        # An undo writes the original text of the record into the config file.
        raise ConfigError(
            f'others can write to "{directory}"', 'name another directory with "--state-dir"'
        )
    try:
        text = files.read(name, MAX_BYTES)
    except ConfigError as error:
        raise ConfigError(error.message, 'name another directory with "--state-dir"') from error
    if text is None:
        return None
    try:
        document = json.loads(text)
        # Records of earlier versions have no runtimes.
        runtimes = tuple(map(_registration, document.get("runtimes", [])))
        directories = tuple(document["directories"])
        record = UndoRecord(
            document["path"], document["original"], document["written"], directories, runtimes
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f'"{name}" is not an undo record', "remove it") from error
    if document.get("format") != FORMAT or record.path != files.resolve(path):
        raise ConfigError(f'"{name}" is not the undo record of "{path}"', "remove it")
    return record


def _registration(fields: dict[str, Any]) -> Registration:
    entry = fields["entry"]
    entry = RuntimeEntry(**{**entry, "annotations": tuple(entry["annotations"])})
    return Registration(**{**fields, "entry": entry})


def store(directory: str, record: UndoRecord) -> None:
    """Write *record* to *directory*; raise ConfigError if that fails."""
    document = {
        "format": FORMAT,
        "path": record.path,
        "original": record.original,
        "written": record.written,
        "directories": list(record.directories),
        "runtimes": [dataclasses.asdict(registration) for registration in record.runtimes],
    }
    name = _name(directory, record.path)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # A config can contain the passwords of registries.
        files.replace(name, json.dumps(document, indent=2) + "\n", 0o600)
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f'cannot record the original of "{record.path}" in "{directory}": {error}',
            'name another directory with "--state-dir"',
        ) from error


def forget(directory: str, path: str) -> None:
    """Remove the record of the file *path*, if any, and the directory if it becomes empty."""
    directories = [directory]
    if os.path.basename(os.path.dirname(directory)) == "gpuruntime":
        directories.append(os.path.dirname(directory))
    files.remove(_name(directory, path), directories)


def _name(directory: str, path: str) -> str:
    digest = hashlib.sha256(os.fsencode(files.resolve(path))).hexdigest()
    return os.path.join(directory, f"{digest[:32]}.json")
