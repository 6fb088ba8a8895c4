# SPDX-License-Identifier: Apache-2.0
"""The configuration: which config.toml is in force, and the values of its options.

On the start path, which never parses TOML: snapshots/config_snapshot.py loads the values.
"""

from __future__ import annotations

import _stat as stat
import posix as os

from cdi import pathnames
from gpuruntime.errors import ConfigError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# Key → default; None means that a boolean is not set. gpuruntime/configfile/option_table.py
# describes each key, and a test compares the two: that table is too expensive for the start path.
RUNTIME = "nvidia-container-runtime"
DEFAULTS: dict[str, Any] = {
    "accept-nvidia-visible-devices-as-volume-mounts": False,
    "accept-nvidia-visible-devices-envvar-when-unprivileged": True,
    "disable-require": False,
    "discovery-timeout": 30,
    "health": "",
    "hook-deadline": 10,
    "ldconfig-mode": "merge",
    "missing-gpu": "error",
    "supported-driver-capabilities": "compat32,compute,display,graphics,ngx,utility,video",
    "swarm-resource": "",
    "features.allow-cuda-compat-libs-from-container": None,
    "features.allow-ldconfig-from-container": None,
    "features.allow-unknown-oci-spec-fields": None,
    "features.disable-cuda-compat-lib-hook": None,
    "features.disable-imex-channel-creation": None,
    "features.ignore-imex-channel-requests": None,
    "features.no-additional-gids-for-device-nodes": None,
    "nvidia-container-cli.debug": "",
    "nvidia-container-cli.environment": [],
    "nvidia-container-cli.ldcache": "",
    "nvidia-container-cli.ldconfig": "@/sbin/ldconfig",
    "nvidia-container-cli.load-kmods": True,
    "nvidia-container-cli.no-cgroups": False,
    "nvidia-container-cli.no-pivot": False,
    "nvidia-container-cli.path": "",
    "nvidia-container-cli.root": "",
    "nvidia-container-cli.user": "",
    f"{RUNTIME}.debug": "/dev/null",
    f"{RUNTIME}.log-level": "info",
    f"{RUNTIME}.mode": "auto",
    f"{RUNTIME}.runtimes": ["runc", "crun"],
    f"{RUNTIME}.modes.cdi.annotation-prefixes": ["cdi.k8s.io/"],
    f"{RUNTIME}.modes.cdi.default-kind": "nvidia.com/gpu",
    f"{RUNTIME}.modes.cdi.spec-dirs": ["/etc/cdi", "/var/run/cdi"],
    f"{RUNTIME}.modes.csv.compat-container-root": "",
    f"{RUNTIME}.modes.csv.mount-spec-path": f"/etc/{RUNTIME}/host-files-for-container.d",
    f"{RUNTIME}.modes.jit-cdi.driver-capabilities": "env",
    f"{RUNTIME}.modes.jit-cdi.nvcdi-disable-hooks": [],
    f"{RUNTIME}.modes.jit-cdi.nvcdi-feature-flags": [],
    f"{RUNTIME}.modes.legacy.cuda-compat-mode": "ldconfig",
    f"{RUNTIME}-hook.path": "nvidia-container-runtime-hook",
    f"{RUNTIME}-hook.skip-mode-detection": False,
    "nvidia-ctk.path": "nvidia-ctk",
}
AUTO, CDI, CSV, JIT, LEGACY = "auto", "cdi", "csv", "jit-cdi", "legacy"
# With any other mode, containers that request a GPU fail, and all others start.
MODES = (AUTO, CDI, CSV, JIT, LEGACY)
# Level name of the incumbent → our level name.
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
    """The values in force: `config[key]`, and attributes for the most used options.

    *values* has every key of DEFAULTS; *path* is the config file, None without a file.
    """

    __slots__ = (
        "accept_environment",
        "accept_mounts",
        "annotation_prefixes",
        "debug",
        "default_kind",
        "driver_root",
        "features",
        "log_level",
        "mode",
        "path",
        "runtimes",
        "spec_dirs",
        "swarm",
        "values",
    )

    def __init__(self, values: Mapping[str, Any], path: str | None) -> None:
        """Use *values* by key, and defaults for missing keys; *path* is the file, if any."""
        merged = {**DEFAULTS, **values}
        self.values: dict[str, Any] = merged
        self.path = path
        accept = "accept-nvidia-visible-devices"
        self.accept_environment: bool = merged[f"{accept}-envvar-when-unprivileged"]
        self.accept_mounts: bool = merged[f"{accept}-as-volume-mounts"]
        names = (name.strip() for name in merged["swarm-resource"].split(","))
        self.swarm: tuple[str, ...] = tuple(name for name in names if name)
        self.features = frozenset(
            key[len("features.") :]
            for key, value in merged.items()
            if value is True and key.startswith("features.")
        )
        self.driver_root: str = merged["nvidia-container-cli.root"]
        self.debug: str = merged[f"{RUNTIME}.debug"]
        self.log_level = LOG_LEVELS.get(merged[f"{RUNTIME}.log-level"].lower(), "info")
        self.runtimes: tuple[str, ...] = tuple(merged[f"{RUNTIME}.runtimes"])
        self.mode: str = merged[f"{RUNTIME}.mode"]
        cdi = f"{RUNTIME}.modes.cdi"
        self.spec_dirs: tuple[str, ...] = tuple(merged[f"{cdi}.spec-dirs"])
        self.default_kind: str = merged[f"{cdi}.default-kind"]
        self.annotation_prefixes: tuple[str, ...] = tuple(merged[f"{cdi}.annotation-prefixes"])

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 (the type depends on the option)
        """Return the value of the option *key*."""
        return self.values[key]


def environment_of_process() -> dict[str, str]:
    """Return the initial environment variables of this process, decoded as in `os.environ`."""
    return {
        name.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for name, value in os.environ.items()
    }


def search_path(environment: Mapping[str, str]) -> list[str]:
    """Return the paths of the possible config files; the first that exists is in force.

    The launcher has the same list.
    """
    paths = [environment.get("GPURUNTIME_CONFIG"), environment.get("NVIDIA_CTK_CONFIG_FILE_PATH")]
    home = environment.get("XDG_CONFIG_HOME")
    directories = ("gpuruntime", "nvidia-container-runtime")
    if home:
        paths += [pathnames.join(home, f"{name}/config.toml") for name in directories]
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
                f'cannot access "{path}": {error.strerror}', "make the config file readable"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f'"{path}" is not a regular file', "put a config file there")
        return path, status
    return None


def stamp(path: str, status: os.stat_result) -> list[Any]:
    """Return values that change with the config file *path*; *status* is its current status.

    They include ctime because tools restore mtime: an archive that is extracted twice leaves the
    same inode, size and mtime. The launcher computes the same values.
    """
    return [
        *(path, status.st_dev, status.st_ino, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    ]
