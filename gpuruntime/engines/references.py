# SPDX-License-Identifier: Apache-2.0
"""Find the engines' config files that name our programs, and the commands that undo that."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from gpuruntime.engines import config_paths, document_edits, files, rancher, undo_records
from gpuruntime.engines.config_paths import EngineConfig, HostFacts
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import Registration
from gpuruntime.errors import ConfigError

DEFAULT_NAME = config_paths.BRANDS[0]
_IN_TEMPLATE = re.compile(
    r"""\.runtimes\.["']?([\w.-]+?)["']?\.options\][^\[]*?BinaryName\s*=\s*["']([^"'\n]+)""",
    re.DOTALL,
)


class Reference(NamedTuple):
    """The config file *path* names a program as the runtime *name*; *command* undoes that."""

    path: str
    name: str
    command: str


def find(programs: Collection[str], host: HostFacts, state: str) -> list[Reference]:
    """Return the references to *programs* in the recorded files and in the usual config files.

    A file that cannot be read or parsed is skipped.
    """
    references: dict[tuple[str, str], Reference] = {}
    for record in undo_records.load_all(state):
        for registration in record.runtimes:
            if registration.entry.name in _names_in(record.path, programs):
                command = _command_for(registration, host)
                reference = Reference(record.path, registration.entry.name, command)
                references[reference[:2]] = reference
    for engine in filter(None, (_engine(name, host) for name in config_paths.names())):
        for path in _usual_files(engine):
            for name in _names_in(path, programs):
                key = (os.path.realpath(path), name)
                references.setdefault(key, Reference(path, name, _command(engine.name, name)))
    return sorted(references.values())


def _engine(name: str, host: HostFacts) -> EngineConfig | None:
    try:
        return config_paths.find(name, host, DEFAULT_NAME)
    except ConfigError:
        # The docker snap, whose files we never edit.
        return None


def _usual_files(engine: EngineConfig) -> list[str]:
    if engine.family == "template":
        return [os.path.join(engine.config, name) for name in rancher.NAMES]
    drop_ins = config_paths.other_drop_ins(engine.drop_in)
    return [path for path in (engine.config, engine.drop_in, *drop_ins) if path]


def _command_for(registration: Registration, host: HostFacts) -> str:
    """Return the command that undoes *registration*, with the options that it needs."""
    config, drop_in = registration.config, registration.drop_in
    options = []
    engine = _engine(registration.engine, host)
    if engine is not None and config != engine.config:
        options += ["--config", config]
        engine = config_paths.beside(engine, config, DEFAULT_NAME)
    if engine is not None and drop_in not in (
        engine.drop_in,
        *config_paths.other_drop_ins(engine.drop_in),
    ):
        options += ["--drop-in-config", drop_in]
    return _command(registration.engine, registration.entry.name, *options)


def _command(engine: str, name: str, *options: str) -> str:
    words = ["gpuruntime", "runtime", "configure", "--undo", "--runtime", engine]
    words += ["--runtime-name", name] if name != DEFAULT_NAME else []
    return shlex.join([*words, *options])


def _names_in(path: str, programs: Collection[str]) -> list[str]:
    """Return the names of the runtimes in the file *path* that run one of *programs*."""
    try:
        text = files.read(path) or ""
        if not any(program in text for program in programs):
            return []
        if path.endswith(rancher.NAMES):
            return [name for name, program in _IN_TEMPLATE.findall(text) if program in programs]
        kind: document_edits.Kind = "json" if path.endswith(".json") else "toml"
        document = document_edits.parse(kind, text)
    except (ConfigError, BadFileError):
        return []
    return sorted(set(_names((), document, programs)))


def _names(path: document_edits.Path, value: Any, programs: Collection[str]) -> Iterator[str]:  # noqa: ANN401
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _names((*path, key), item, programs)
    elif isinstance(value, list):
        for item in value:
            yield from _names(path, item, programs)
    elif value in programs and "runtimes" in path[:-1]:
        # In every engine's config the key behind "runtimes" is the name of a runtime.
        yield path[path.index("runtimes") + 1]
