# SPDX-License-Identifier: Apache-2.0
"""The config files that register a runtime with each engine; reads only."""

from __future__ import annotations

from collections.abc import Callable

from gpuruntime.engines import containerd, crio, docker, k0s, podman, rancher
from gpuruntime.engines.config_files import FileSet
from gpuruntime.engines.config_paths import EngineConfig
from gpuruntime.engines.errors import BadFileError
from gpuruntime.engines.runtime_entry import RuntimeEntry


def to_configure(engine: EngineConfig, entry: RuntimeEntry, source: str | None = None) -> FileSet:
    """Return the files of *engine* for *entry*.

    *source* is the config that the engine itself prints, for what is copied. Raises ConfigError.
    """
    try:
        return _FILES_OF[engine.family](engine, entry, source)
    except BadFileError as error:
        raise error.of(engine.config) from error


def to_undo(engine: EngineConfig, entry: RuntimeEntry) -> FileSet:
    """Return the files of *engine* that may have *entry* in them. Raises ConfigError."""
    if engine.family == "template":
        return rancher.files_to_undo(engine, entry)
    found = [
        config_file
        for each in containerd.drop_ins(engine)
        for config_file in to_configure(each, entry).files
    ]
    # The file that imports them is among the files of each.
    return FileSet(list({config_file.path: config_file for config_file in found}.values()), [])


_FILES_OF: dict[str, Callable[[EngineConfig, RuntimeEntry, str | None], FileSet]] = {
    "docker": docker.files_of,
    "containerd": containerd.files_of,
    "k0s": k0s.files_of,
    "crio": crio.files_of,
    "podman": podman.files_of,
    "template": rancher.files_of,
}
