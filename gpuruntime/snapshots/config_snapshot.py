# SPDX-License-Identifier: Apache-2.0
"""Load the configuration from config.toml's values, which are stored as a JSON snapshot.

On the start path. The snapshot records the path, inode, size and times of the file that it was
compiled from. It is not valid for another file, or for a later state of that file.
"""

from __future__ import annotations

from gpuruntime.config import Config, find, stamp
from gpuruntime.snapshots import storage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from gpuruntime.snapshots.grants import SavedGrants

NAME = "config.json"
# 4: the stamp of the config file includes ctime.
FORMAT = 4
MAX_BYTES = 1 << 20


def load(
    environment: Mapping[str, str],
    compile_file: Callable[[str], Any],
    saved: SavedGrants | None = None,
) -> Config:
    """Return the configuration that *environment* selects.

    The values come from *saved*, or else from the snapshot. If neither is valid, *compile_file* is
    called with the path of the config file; it returns the values by key. Raises ConfigError.
    """
    config_file = find(environment)
    if config_file is None:
        mark = path = None
        values: Mapping[str, Any] = {}
    else:
        path, mark = config_file[0], stamp(*config_file)
        stored_values = saved.values(mark) if saved is not None else None
        if stored_values is None:
            stored_values = _read_snapshot(mark)
        values = compile_file(path) if stored_values is None else stored_values
    if saved is not None:
        saved.use(mark, values)
    return Config(values, path)


def compiled(mark: list[Any] | None) -> Config | None:
    """Return the configuration in the snapshot of the file with the stamp *mark*, or None.

    If *mark* is None there is no config file, and the configuration has the defaults.
    """
    if mark is None:
        return Config({}, None)
    values = _read_snapshot(mark)
    return None if values is None else Config(values, mark[0])


def _read_snapshot(expected: list[Any]) -> dict[str, Any] | None:
    """Return the values of the snapshot if trusted and with the stamp *expected*, else None."""
    snapshot = storage.read_object(storage.RUN_DIRECTORY, NAME, MAX_BYTES)
    if snapshot is None or snapshot.get("format") != FORMAT:
        return None
    values = snapshot.get("values")
    if snapshot.get("file") != expected or not isinstance(values, dict):
        return None
    return values
