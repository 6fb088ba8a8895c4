# SPDX-License-Identifier: Apache-2.0
"""The configuration: which file is in force, its values, the compiled snapshot.

On the start path, which never parses TOML: values come from a JSON snapshot that records the file
it was compiled from; a snapshot of another file, or of another state of it, does not count.
"""

from __future__ import annotations

import json
import os
import posixpath
import stat

from gpuruntime.errors import ConfigError
from gpuruntime.record import Record
from gpuruntime.trust import may_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

RUN_DIRECTORY = "/run/gpuruntime"
SNAPSHOT = f"{RUN_DIRECTORY}/config.json"
FORMAT = 1
MAX_SNAPSHOT_BYTES = 1 << 20

# Key → default. The type of the default is the type of the key.
DEFAULTS: dict[str, Any] = {
    "nvidia-container-runtime.debug": "/dev/null",
    "nvidia-container-runtime.log-level": "info",
    "nvidia-container-runtime.runtimes": ["runc", "crun"],
    "nvidia-container-runtime.mode": "auto",
    "nvidia-container-runtime.modes.cdi.spec-dirs": ["/etc/cdi", "/var/run/cdi"],
    "nvidia-container-runtime.modes.cdi.default-kind": "nvidia.com/gpu",
}
# `auto` means `cdi` as long as that is the only mode there is.
MODES = ("auto", "cdi")
# The level names of the incumbent → ours.
LOG_LEVELS = {
    "panic": "error",
    "fatal": "error",
    "error": "error",
    "warn": "warning",
    "warning": "warning",
    "info": "info",
    "debug": "debug",
    "trace": "debug",
}


class Config(Record):
    """The values in force, by the name of their key's last part."""

    __slots__ = ("debug", "default_kind", "log_level", "mode", "path", "runtimes", "spec_dirs")

    def __init__(self, values: Mapping[str, Any], path: str | None) -> None:
        """Take *values* by key, a default for each that is missing; *path* is the file, if any."""
        merged = {**DEFAULTS, **values}
        self.path = path
        self.debug: str = merged["nvidia-container-runtime.debug"]
        self.log_level = LOG_LEVELS.get(merged["nvidia-container-runtime.log-level"], "info")
        self.runtimes = tuple(merged["nvidia-container-runtime.runtimes"])
        self.mode: str = merged["nvidia-container-runtime.mode"]
        cdi = "nvidia-container-runtime.modes.cdi"
        self.spec_dirs = tuple(merged[f"{cdi}.spec-dirs"])
        self.default_kind: str = merged[f"{cdi}.default-kind"]


def search_path(environment: Mapping[str, str]) -> list[str]:
    """Return the paths where a config file is looked for, first that exists wins.

    The launcher has the same list.
    """
    paths = [environment.get("GPURUNTIME_CONFIG"), environment.get("NVIDIA_CTK_CONFIG_FILE_PATH")]
    home = environment.get("XDG_CONFIG_HOME")
    directories = ("gpuruntime", "nvidia-container-runtime")
    if home:
        paths += [posixpath.join(home, name, "config.toml") for name in directories]
    paths += [f"/etc/{name}/config.toml" for name in directories]
    return [path for path in paths if path]


def find(environment: Mapping[str, str]) -> tuple[str, os.stat_result] | None:
    """Return the config file in force and its status, or None; raise ConfigError if unreadable."""
    for path in search_path(environment):
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigError(
                f'cannot look at "{path}": {error.strerror}', "make the config file readable"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f'"{path}" is no regular file', "put a config file there")
        return path, status
    return None


def stamp(path: str, status: os.stat_result) -> list[object]:
    """Return what tells one state of a config file from another."""
    return [path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def load(environment: Mapping[str, str], compile_file: Any) -> Config:  # noqa: ANN401 (a callable)
    """Return the configuration that *environment* selects.

    *compile_file* is called with the path when the snapshot does not fit, and returns the values
    by key. Raises ConfigError.
    """
    found = find(environment)
    if found is None:
        return Config({}, None)
    values = _read_snapshot(stamp(*found))
    return Config(compile_file(found[0]) if values is None else values, found[0])


def _read_snapshot(expected: list[object]) -> dict[str, Any] | None:
    """Return the values of the snapshot if it is ours and of the file *expected*, else None."""
    try:
        fd = os.open(SNAPSHOT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not (
            stat.S_ISREG(status.st_mode)
            and may_trust(status)
            and may_trust(os.stat(RUN_DIRECTORY))
            and status.st_size <= MAX_SNAPSHOT_BYTES
        ):
            return None
        snapshot = json.loads(os.read(fd, MAX_SNAPSHOT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(fd)
    if not isinstance(snapshot, dict) or snapshot.get("format") != FORMAT:
        return None
    values = snapshot.get("values")
    if snapshot.get("file") != expected or not isinstance(values, dict):
        return None
    return values
