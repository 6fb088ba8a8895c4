# SPDX-License-Identifier: Apache-2.0
"""The values of config.toml as a JSON snapshot, and the configuration loaded from it.

On the start path. The snapshot records the path, inode, size and times of the file it was compiled
from; it is not valid for another file, or for another state of that file.
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
# 4: the stamp of the config file has ctime.
FORMAT = 4
MAX_BYTES = 1 << 20


def load(
    environment: Mapping[str, str],
    compile_file: Callable[[str], Any],
    saved: SavedGrants | None = None,
) -> Config:
    """Return the configuration that *environment* selects.

    Its values are those in *saved*, which keeps them, or in the snapshot of config files;
    *compile_file* is called with the path when neither fits, and returns the values by key.
    Raises ConfigError.
    """
    found = find(environment)
    if found is None:
        mark = path = None
        values: Mapping[str, Any] = {}
    else:
        path, mark = found[0], stamp(*found)
        kept = saved.values(mark) if saved is not None else None
        if kept is None:
            kept = _read_snapshot(mark)
        values = compile_file(path) if kept is None else kept
    if saved is not None:
        saved.use(mark, values)
    return Config(values, path)


def compiled(mark: list[Any] | None) -> Config | None:
    """Return the configuration as it was compiled from the file with the stamp *mark*, or None.

    Without a config file there is no *mark*, and nothing to compile.
    """
    if mark is None:
        return Config({}, None)
    values = _read_snapshot(mark)
    return None if values is None else Config(values, mark[0])


def _read_snapshot(expected: list[Any]) -> dict[str, Any] | None:
    """Return the values of the snapshot if it is ours and of the file *expected*, else None."""
    snapshot = storage.read_object(storage.RUN_DIRECTORY, NAME, MAX_BYTES)
    if snapshot is None or snapshot.get("format") != FORMAT:
        return None
    values = snapshot.get("values")
    if snapshot.get("file") != expected or not isinstance(values, dict):
        return None
    return values
