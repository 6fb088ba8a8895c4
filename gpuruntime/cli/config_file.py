# SPDX-License-Identifier: Apache-2.0
"""Read and replace the file config.toml; raises ConfigError for whatever keeps us from it."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from typing import Any

from gpuruntime.errors import ConfigError
from gpuruntime.trust import may_trust

MAX_CONFIG_BYTES = 256 << 10
NEW_FILE_MODE = 0o644
# tomllib's memory grows with the square of the parts of a key.
_LONG_KEY = re.compile(
    r"""(?:^|[\[{,])[ \t]*(?:(?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){64}""", re.MULTILINE
)


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
        raise ConfigError(f'"{path}" line {line}: no UTF-8', "correct the file") from error


def _read(fd: int, path: str, status: os.stat_result) -> bytes:
    """Return what the file *fd* holds, or one byte more than it may."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f'"{path}" is no regular file', "put a config file there")
    with open(fd, "rb", closefd=False) as stream:
        return stream.read(MAX_CONFIG_BYTES + 1)


def parse(text: str, path: str) -> dict[str, Any]:
    """Return the document that *text* of the file *path* is."""
    if _LONG_KEY.search(text):
        raise ConfigError(f'"{path}" has a key of too many parts', "put a config file there")
    try:
        return tomllib.loads(text)
    # ValueError: more than TOMLDecodeError comes out, as for a number of 5000 digits.
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f'"{path}" is no TOML: {error}', "correct the file") from error


def replace(path: str, text: str) -> bool:
    """Have *text* in the file *path*, atomically, and tell whether that changed it.

    What is missing of its directory is made (0755). A file that is there keeps mode and owner, a
    link to it stays one.
    """
    try:
        return _replace(_target(path), text.encode())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'cannot write "{path}": {_reason(error)}',
            'name another file with "--output", or run as root',
        ) from error


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _target(path: str) -> str:
    """Return the path of what a link *path* leads to, or else *path*."""
    if not os.path.islink(path):
        return path
    # Someone else's link could lead anywhere, and we are root.
    if not may_trust(os.stat(os.path.dirname(os.path.abspath(path)))):
        raise ConfigError(
            f'"{path}" is a link where others may write', "name the file that is meant"
        )
    return os.path.realpath(path)


def _replace(path: str, data: bytes) -> bool:
    directory, name = os.path.split(os.path.abspath(path))
    os.makedirs(directory, mode=0o755, exist_ok=True)
    before = _status(path)
    if before is not None and before.st_size == len(data):
        with open(path, "rb") as stream:
            if stream.read() == data:
                return False
    dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        temporary = f".{name[:64]}.{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=dirfd)
        try:
            with open(fd, "wb") as stream:
                stream.write(data)
                stream.flush()
                if before is not None and (before.st_uid, before.st_gid) != _owner(fd):
                    os.fchown(fd, before.st_uid, before.st_gid)
                # After the owner: a change of that takes bits away.
                os.fchmod(fd, NEW_FILE_MODE if before is None else stat.S_IMODE(before.st_mode))
                os.fsync(fd)
            os.rename(temporary, name, src_dir_fd=dirfd, dst_dir_fd=dirfd)
        except BaseException:
            os.unlink(temporary, dir_fd=dirfd)
            raise
        os.fsync(dirfd)
    finally:
        os.close(dirfd)
    return True


def _owner(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_uid, status.st_gid


def _status(path: str) -> os.stat_result | None:
    """Return the status of the file *path*, None if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        # A device or a FIFO would be gone for everybody.
        raise ConfigError(f'"{path}" is no regular file', 'use "-" for standard output')
    return status
