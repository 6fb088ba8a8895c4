# SPDX-License-Identifier: Apache-2.0
"""The config.toml that `gpuruntime explain` assumes: a file of its option, or the one in force."""

from __future__ import annotations

import os
from typing import Any

from gpuruntime import config as settings
from gpuruntime.configfile import file as config_file
from gpuruntime.configfile.compilation import accepted


def path_of(path: str | None) -> str | None:
    """Return *path*, by default that of the file in force; None if there is no file.

    Raises ConfigError.
    """
    if path is not None:
        return path
    in_force = settings.find(os.environ)
    return in_force[0] if in_force else None


def read(path: str | None, warnings: list[str]) -> dict[str, Any]:
    """Return the values of the file *path*, {} for None; add to *warnings*; raise ConfigError."""
    if path is None:
        return {}
    values, file_warnings = accepted(path, config_file.read(path)[0])
    warnings += file_warnings
    return values
