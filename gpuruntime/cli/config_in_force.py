# SPDX-License-Identifier: Apache-2.0
"""The values of the config.toml in force, for commands that need few of them."""

from __future__ import annotations

import os

from gpuruntime import config as settings
from gpuruntime.config import Config
from gpuruntime.snapshots import config_snapshot


def load() -> Config:
    """Return the configuration in force; raise ConfigError if its file cannot be used."""
    file = settings.find(os.environ)
    if file is None:
        return Config({}, None)
    snapshot = config_snapshot.compiled(settings.stamp(*file))
    if snapshot is not None:
        return snapshot
    # Imports a TOML parser: only needed if no container start has compiled the file yet.
    from gpuruntime.configfile import compilation  # noqa: PLC0415
    from gpuruntime.configfile import file as files  # noqa: PLC0415

    path = file[0]
    values, _ = compilation.accepted(path, files.read(path)[0])
    return Config(values, path)


def driver_root() -> str:
    """Return the driver root of the configuration in force, "/" by default; raise ConfigError."""
    return load().driver_root or "/"
