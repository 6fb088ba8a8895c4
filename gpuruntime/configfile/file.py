# SPDX-License-Identifier: Apache-2.0
"""Read and replace the file config.toml; every failure is a ConfigError."""

from __future__ import annotations

import os
import stat
import tomllib
from typing import Any

from gpuruntime.engines import files
from gpuruntime.errors import ConfigError
from gpuruntime.formats.toml_source import LONG_KEY

MAX_CONFIG_BYTES = 256 << 10


def read(path: str) -> tuple[str, os.stat_result]:
    """Return the text of the file *path*, and the status of that file."""
    try:
        # O_NONBLOCK: a FIFO must not hang us.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            data = _read(fd, path, status)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'cannot read "{path}": {_reason(error)}', "make the config file readable"
        ) from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f'"{path}" has more than {MAX_CONFIG_BYTES} bytes', "put a config file there"
        )
    try:
        return data.decode(), status
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f'"{path}" line {line}: not valid UTF-8', "correct the file") from error


def _read(fd: int, path: str, status: os.stat_result) -> bytes:
    """Return the bytes of the file *fd*, or one byte more than the limit."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f'"{path}" is not a regular file', "put a config file there")
    return _content(fd, MAX_CONFIG_BYTES + 1)


def parse(text: str, path: str) -> dict[str, Any]:
    """Return the TOML document *text* of the file *path*; raise ConfigError."""
    if LONG_KEY.search(text):
        raise ConfigError(f'"{path}" has a key with too many parts', "put a config file there")
    try:
        return tomllib.loads(text)
    # ValueError, not only TOMLDecodeError: a number of 5000 digits raises it, for example.
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f'"{path}" is not valid TOML: {error}', "correct the file") from error


def replace(path: str, text: str) -> bool:
    """Replace the content of the file *path* by *text*, atomically; return whether it changed.

    Missing directories are created with mode 0755. An existing file keeps its mode and owner, and
    a symlink to it stays a symlink. Raises ConfigError.
    """
    if _holds(files.resolve(path), text.encode()):
        return False
    files.replace(path, text)
    return True


def _holds(path: str, data: bytes) -> bool:
    """Return whether *path* is a readable file whose content is *data*."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and _content(fd, len(data) + 1) == data
    finally:
        os.close(fd)


def _content(fd: int, limit: int) -> bytes:
    with open(fd, "rb", closefd=False) as stream:
        return stream.read(limit)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
