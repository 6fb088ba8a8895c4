# SPDX-License-Identifier: Apache-2.0
"""Compile config.toml for the start path: its snapshot, and the launcher's companion file."""

from __future__ import annotations

import os

from cdi import strictjson
from gpuruntime import config as settings
from gpuruntime.configfile import check, lines
from gpuruntime.configfile import file as files
from gpuruntime.configfile.check import OptionFinding
from gpuruntime.errors import ConfigError
from gpuruntime.launcher import companion
from gpuruntime.snapshots import config_snapshot, storage
from gpuruntime.system.replace import replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A file of another program has one warning for each line: nobody reads all of them.
MAX_WARNINGS = 50


def compile_file(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of *path* by key, and warnings; store snapshot and companion if possible.

    Raises ConfigError as `accepted`, and if the file cannot be read.
    """
    text, status = files.read(path)
    values, warnings = accepted(path, text)
    try:
        _store(path, status, values)
    except OSError as error:
        warnings.append(
            f'each start compiles "{path}": cannot write below '
            f'"{storage.RUN_DIRECTORY}": {error.strerror}'
        )
    return values, warnings


def accepted(path: str, text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the file *path* by key, and warnings.

    Raises ConfigError for a fault with which no container can start. A fault that concerns only
    containers that request a GPU is a warning: the request of such a container raises the error.
    """
    values, findings = check.examine(files.parse(text, path))
    places = lines.lines(text) if findings else {}

    def where(finding: OptionFinding) -> str:
        line = lines.line_of(finding.path, places)
        return f'"{path}"' + (f" line {line}" if line else "")

    for finding in findings:
        if finding.severity == check.ERROR and not finding.gpu_only:
            raise ConfigError(f"{where(finding)}: {finding.message}", finding.hint)
    warnings = [
        f"{where(finding)}: {check.sentence(finding)}"
        for finding in findings
        if finding.severity != check.NOTE
    ]
    if len(warnings) > MAX_WARNINGS:
        more = f'"{path}": {len(warnings) - MAX_WARNINGS} more: see "gpuruntime config check"'
        warnings[MAX_WARNINGS:] = [more]
    return values, warnings


def _store(path: str, status: os.stat_result, values: dict[str, Any]) -> None:
    """Write the snapshot, and the companion file with what the launcher may decide alone."""
    storage.make_directory(storage.RUN_DIRECTORY)
    dirfd = os.open(storage.RUN_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        stamp = settings.stamp(path, status)
        snapshot = {"format": config_snapshot.FORMAT, "file": stamp, "values": values}
        data = strictjson.dumps(snapshot).encode()
        replace_file(dirfd, config_snapshot.NAME, data, 0o644)
    finally:
        os.close(dirfd)
    companion.store(settings.Config(values, path), stamp)
