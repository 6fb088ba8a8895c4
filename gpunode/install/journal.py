# SPDX-License-Identifier: Apache-2.0
"""The journal of an installation: what must be undone, and what an interrupted call left to do.

It is written before the step that it describes, and every step may be repeated. So the next call
finishes what a killed one began.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

from gpunode.install.errors import InstallError
from gpuruntime.engines import files
from gpuruntime.errors import ConfigError

FORMAT = 1
_NAME = "install.json"


@dataclass(frozen=True, slots=True)
class Registered:
    """A runtime of ours in the config of an engine; *config* "" is the engine's usual file.

    *must_restart*: the engine has not been told to read its config again.
    """

    engine: str
    name: str
    config: str = ""
    must_restart: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """The key: a later registration with the same key replaces it."""
        return (self.engine, self.name, self.config)


@dataclass(frozen=True, slots=True)
class Journal:
    """The *registered* runtimes, and the *directories* that were created for the installation."""

    registered: tuple[Registered, ...] = ()
    directories: tuple[str, ...] = ()

    def with_registered(self, new: Registered) -> Journal:
        """Return the journal with *new*, in the place of one with the same key."""
        others = tuple(old for old in self.registered if old.key != new.key)
        return dataclasses.replace(self, registered=(*others, new))

    def without(self, gone: Registered) -> Journal:
        """Return the journal without the registration *gone*."""
        others = tuple(old for old in self.registered if old.key != gone.key)
        return dataclasses.replace(self, registered=others)

    def get(self, key: tuple[str, str, str]) -> Registered | None:
        """Return the registration with *key*, None without one."""
        return next((old for old in self.registered if old.key == key), None)


def load(directory: str) -> Journal | None:
    """Return the journal in *directory*, None if there is none; raise InstallError."""
    path = os.path.join(directory, _NAME)
    try:
        text = files.read(path)
        return None if text is None else _parsed(json.loads(text))
    except ConfigError as error:
        raise InstallError(error.message, error.hint) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InstallError(
            f'"{path}" is not the journal of an installation',
            'remove it, and undo the engines\' configs by "gpuruntime runtime configure --undo"',
        ) from error


def _parsed(document: dict[str, Any]) -> Journal:
    if document["format"] != FORMAT:
        raise ValueError(document["format"])
    registered = tuple(Registered(**fields) for fields in document["registered"])
    return Journal(registered, tuple(map(str, document["directories"])))


def store(directory: str, journal: Journal) -> None:
    """Replace the journal in *directory*; raise InstallError."""
    document = {"format": FORMAT, **dataclasses.asdict(journal)}
    try:
        files.replace(os.path.join(directory, _NAME), json.dumps(document, indent=2) + "\n", 0o600)
    except ConfigError as error:
        raise InstallError(error.message, error.hint) from error


def remove(directory: str) -> None:
    """Remove the journal from *directory*; raise InstallError."""
    try:
        files.remove(os.path.join(directory, _NAME), [])
    except ConfigError as error:
        raise InstallError(error.message, error.hint) from error
