# SPDX-License-Identifier: Apache-2.0
"""The config file that the services of a node use: a fixed one, or one of several by a label."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpunode.config import named
from gpuruntime.errors import ArgumentError, ConfigError

log = logging.getLogger(__name__)

_NOT_READ = "the label of the node has not been read yet"


@dataclass(frozen=True, slots=True)
class NamedConfigs:
    """The files of *directory*, and which of them a node without the label uses."""

    directory: str
    default: str = ""
    strategies: tuple[str, ...] = (named.NAMED, named.SINGLE)

    def path_of(self, value: str | None) -> str:
        """Return the path of the config for the label's *value*; raise ConfigError."""
        name = named.choose(value, names_in(self.directory), self.default, self.strategies)
        return os.path.join(self.directory, name) if name else named.NO_FILE


def names_in(directory: str) -> list[str]:
    """Return the names of the config files in *directory*, sorted; raise ConfigError."""
    try:
        # A mounted ConfigMap has its files as symlinks, and hidden directories beside them.
        return sorted(
            entry.name
            for entry in os.scandir(directory)
            if not entry.name.startswith(".") and entry.is_file()
        )
    except OSError as error:
        raise ConfigError(
            f'cannot read the directory of configs "{directory}": {error.strerror}',
            "name a directory with config files",
        ) from error


class NotChosenError(ConfigError):
    """No config is chosen yet."""


class ConfigChoice:
    """The config in force is at *path*: "" until one is chosen.

    *configs* is None if the path is fixed; `NO_FILE` is then no config file. *on_change* is called
    after another file was chosen. A label that names no config changes nothing: *problem* says so.
    """

    def __init__(self, path: str, configs: NamedConfigs | None = None) -> None:
        self.configs = configs
        self.path = "" if configs is not None else path or named.NO_FILE
        self.problem = ""
        self.on_change: Callable[[], None] = lambda: None
        self._value: str | None = None
        self._is_read = configs is None

    def load_path(self) -> str:
        """Return the path of the config file, "" for an empty config; raise ConfigError."""
        if not self.path:
            raise NotChosenError(self.problem or _NOT_READ, "see /healthz of the agent")
        return "" if self.path == named.NO_FILE else self.path

    def take(self, value: str | None) -> None:
        """Use the config of the label's *value*, None if the node does not have the label."""
        self._value, self._is_read = value, True
        self.check()

    def check(self) -> None:
        """Choose again: the directory may have other files now."""
        if self.configs is None or not self._is_read:
            return
        try:
            path = self.configs.path_of(self._value)
        except ConfigError as error:
            if self.problem != error.message:
                log.error("the config is not changed: %s", error.lines())
            self.problem = error.message
            return
        self.problem = ""
        if path != self.path:
            log.info('the config in force is "%s"', path)
            self.path = path
            self.on_change()

    def report(self) -> dict[str, Any]:
        """Return the state of the choice for probes."""
        reason = self.problem
        if not self.path and not reason:
            reason = _NOT_READ
        return {"path": self.path, "problem": reason}


def strategies_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return *words* if each is a fallback strategy; raise ArgumentError."""
    for word in words:
        if word not in named.STRATEGIES:
            raise ArgumentError(
                f'"{word}" is not a fallback strategy', f"use {', '.join(named.STRATEGIES)}"
            )
    return tuple(words)
