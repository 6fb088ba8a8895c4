# SPDX-License-Identifier: Apache-2.0
"""The lock of the managers of MIG, and the journal of a change that has not ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from gpunode.mig import states
from gpunode.mig.states import Target
from gpuruntime import atomic_replace
from gpuruntime.errors import ConfigError, RequestError, escape

DIRECTORY = "/run/gpu-node/mig"
_MAX_BYTES = 1 << 20


class LockedError(RequestError):
    """Another process changes MIG."""


@contextlib.contextmanager
def lock(directory: str) -> Iterator[None]:
    """Hold the lock in *directory*; raise LockedError, or ConfigError if it cannot be made."""
    path = f"{directory}/lock"
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f'cannot lock "{path}": {error.strerror}',
            "run the command as root, or set --state-directory",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = escape(os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip())
            raise LockedError(
                f"MIG is being changed by {holder or 'another process'}", "wait until it ends"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def save(path: str, changes: Mapping[str, tuple[Target, Target]]) -> None:
    """Write UUID → old and new target to *path*; raise ConfigError."""
    values = {
        uuid: {"old": old.plain(), "new": new.plain()} for uuid, (old, new) in changes.items()
    }
    write(path, {"version": "v1", "changes": values})


def write(path: str, document: Mapping[str, Any]) -> None:
    """Write *document* to *path* as a whole, on the disk when this returns; raise ConfigError."""
    temporary = f"{path}.new"
    try:
        # Left over by a writer that was killed; the caller holds the lock.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        data = json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
        atomic_replace.replace(path, temporary, data, os.fsync)
    except OSError as error:
        raise ConfigError(
            f'cannot write "{path}": {error.strerror}', "check the directory"
        ) from error


def load(path: str) -> dict[str, tuple[Target, Target]]:
    """Return the changes in *path*, none without the file; raise ConfigError."""
    document = read(path)
    if document is None:
        return {}
    try:
        return {
            uuid: (states.from_plain(one["old"]), states.from_plain(one["new"]))
            for uuid, one in document["changes"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _invalid(path, error) from error


def read(path: str) -> Any:  # noqa: ANN401 (JSON)
    """Return the content of *path*, None without the file; raise ConfigError."""
    try:
        with open(path, "rb") as stream:
            return json.loads(stream.read(_MAX_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f'cannot read "{path}": {error.strerror}', "check the file") from error
    except (ValueError, RecursionError) as error:
        raise _invalid(path, error) from error


def _invalid(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f'"{path}" is not valid: {escape(str(error))}',
        "remove the file, then apply a MIG config again",
    )


def remove(path: str) -> None:
    """Remove *path* if it is there; raise ConfigError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(
            f'cannot remove "{path}": {error.strerror}', "remove the file"
        ) from error
