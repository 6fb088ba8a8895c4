# SPDX-License-Identifier: Apache-2.0
"""The configuration: which file is in force, its values, the compiled snapshot.

On the start path, which never parses TOML: values come from a JSON snapshot that records the file
it was compiled from; a snapshot of another file, or of another state of it, does not count.
"""

from __future__ import annotations

import os
import posixpath
import stat

from cdi import strictjson
from gpuruntime.errors import ConfigError
from gpuruntime.record import Record
from gpuruntime.trust import may_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from gpuruntime.ready import Ready

RUN_DIRECTORY = "/run/gpuruntime"
SNAPSHOT = f"{RUN_DIRECTORY}/config.json"
# 3: values of keys that the programs before did not know are in it.
FORMAT = 3
MAX_SNAPSHOT_BYTES = 1 << 20

# Key → default; None: not set, true or false. gpuruntime/options.py says what each is for, and a
# test holds the two equal: that table is too much for the start path.
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
AUTO, CDI, JIT, LEGACY = "auto", "cdi", "jit-cdi", "legacy"
# The modes that can be had; every other fails the containers that ask for a GPU, and no more.
MODES = (AUTO, CDI, JIT, LEGACY)
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
    """The values in force: `config[key]`, and under names of their own those that are used most.

    *values* has every key of DEFAULTS; *path* is the file that they are from, None without one.
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
        """Take *values* by key, a default for each that is missing; *path* is the file, if any."""
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

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 (as many types as options)
        """Return the value of the option *key*."""
        return self.values[key]


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


def stamp(path: str, status: os.stat_result) -> list[Any]:
    """Return what tells one state of a config file from another."""
    return [path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def load(
    environment: Mapping[str, str], compile_file: Callable[[str], Any], ready: Ready | None = None
) -> Config:
    """Return the configuration that *environment* selects.

    Its values are those in *ready*, which keeps them, or in the snapshot of config files;
    *compile_file* is called with the path when neither fits, and returns the values by key.
    Raises ConfigError.
    """
    found = find(environment)
    if found is None:
        mark = path = None
        values: Mapping[str, Any] = {}
    else:
        path, mark = found[0], stamp(*found)
        kept = ready.values(mark) if ready is not None else None
        if kept is None:
            kept = _read_snapshot(mark)
        values = compile_file(path) if kept is None else kept
    if ready is not None:
        ready.use(mark, values)
    return Config(values, path)


def compiled(mark: list[Any] | None) -> Config | None:
    """Return the configuration as it was compiled from the file with the stamp *mark*, or None.

    Without a config file there is no *mark*, and nothing to compile.
    """
    if mark is None:
        return Config({}, None)
    values = _read_snapshot(mark)
    return None if values is None else Config(values, mark[0])


def make_directory(path: str) -> None:
    """Make the directory *path* for what we keep, if there is none; raise OSError."""
    try:
        # Not even for a moment may others put something there.
        os.mkdir(path, 0o755)
    except FileExistsError:
        return
    # Whatever the engine's umask is: a rootless engine reads what is in it, too.
    os.chmod(path, 0o755)  # noqa: S103 (a directory without secrets)


def read_object(directory: str, name: str, max_bytes: int) -> dict[str, Any] | None:
    """Return the JSON object in the file *name* of *directory*, None if there is none to trust."""
    try:
        found = strictjson.loads(read_trusted(directory, name, max_bytes))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_trusted(directory: str, name: str, max_bytes: int) -> bytes:
    """Return the bytes of the file *name* of *directory*, none if there is none to trust."""
    try:
        fd = os.open(
            f"{directory}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return b""
    try:
        status = os.fstat(fd)
        if not (
            stat.S_ISREG(status.st_mode)
            and may_trust(status)
            and may_trust(os.stat(directory))
            and status.st_size <= max_bytes
        ):
            return b""
        return os.read(fd, status.st_size)
    except OSError:
        return b""
    finally:
        os.close(fd)


def replace(directory: str, name: str, data: bytes, mode: int = 0o644) -> None:
    """Put *data* into the file *name* of *directory*, or leave it as it is.

    Everyone may read it, unless *mode* says otherwise. What is kept there saves time; where it
    cannot be kept, the next create does without.
    """
    temporary = f"{directory}/.{name}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        make_directory(directory)
        if not may_trust(os.stat(directory)):
            return
        fd = os.open(temporary, flags, 0o600)
    except OSError:
        return
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.rename(temporary, f"{directory}/{name}")
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            # Somebody has taken it away, or the whole directory.
            return


def _read_snapshot(expected: list[Any]) -> dict[str, Any] | None:
    """Return the values of the snapshot if it is ours and of the file *expected*, else None."""
    snapshot = read_object(RUN_DIRECTORY, posixpath.basename(SNAPSHOT), MAX_SNAPSHOT_BYTES)
    if snapshot is None or snapshot.get("format") != FORMAT:
        return None
    values = snapshot.get("values")
    if snapshot.get("file") != expected or not isinstance(values, dict):
        return None
    return values
