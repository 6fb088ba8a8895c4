# SPDX-License-Identifier: Apache-2.0
"""Read, replace and remove config files of engines; symlinks and modes are kept."""

from __future__ import annotations

import os
import re
import stat

from gpuruntime import atomic_replace
from gpuruntime.errors import ConfigError
from gpuruntime.trusted_files import may_trust

MAX_BYTES = 1 << 20
NEW_FILE_MODE = 0o644
# Hidden and without the suffix: an engine that reads "*.toml" ignores the partial file.
_TEMPORARY = ".gpuruntime."


def read(path: str, max_bytes: int = MAX_BYTES) -> str | None:
    """Return the text of the file *path*, None if it does not exist; raise ConfigError."""
    try:
        # O_NONBLOCK: a FIFO must not hang us.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.islink(path):
            raise ConfigError(
                f'"{path}" is a dangling symlink', "remove it, or create its target"
            ) from None
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f'"{path}" is not a regular file', "name a config file")
        with open(fd, "rb", closefd=False) as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise ConfigError(f'"{path}" has more than {max_bytes} bytes', "name a config file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f'"{path}" line {line} is not UTF-8', "save it as UTF-8") from error


def replace(path: str, text: str, mode: int = NEW_FILE_MODE) -> None:
    """Replace the content of the file *path* by *text*, atomically; create missing directories.

    An existing file keeps mode, owner and extended attributes; a symlink to it is kept. Raises
    ConfigError, without a partial write, also if *path* is not a regular file.
    """
    try:
        target = resolve(path)
        for directory in missing_directories(target):
            os.mkdir(directory, 0o755)
        _replace(target, text.encode(), mode)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'cannot write "{path}": {_reason(error)}', "run as root, or name another file"
        ) from error


def remove(path: str, directories: list[str]) -> None:
    """Remove the file *path*, and those of *directories* that become empty."""
    try:
        target = resolve(path)
        os.unlink(target)
        _sync(os.path.dirname(target))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f'cannot remove "{path}": {_reason(error)}', "run as root") from error
    for directory in sorted(directories, key=len, reverse=True):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            # A call that was killed has removed it already, but not those around it.
            continue
        except OSError:
            # The directory has other files, or has been removed by another program.
            return


def remove_leftovers(directory: str) -> None:
    """Remove the partial files that killed processes of ours have left in *directory*."""
    if not os.path.isdir(directory):
        return
    for name in os.listdir(directory):
        digits = name.removeprefix(_TEMPORARY)
        if name != digits and re.fullmatch("[0-9a-f]{16}", digits):
            remove(os.path.join(directory, name), [])


def missing_directories(path: str) -> list[str]:
    """Return the directories that must be created for the file *path*, the outermost first."""
    missing = []
    directory = os.path.dirname(resolve(path))
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    return missing[::-1]


def resolve(path: str) -> str:
    """Return *path* with symlinks resolved; raise ConfigError for an untrusted symlink."""
    if os.path.islink(path) and not may_trust(os.stat(os.path.dirname(os.path.abspath(path)))):
        # A symlink of another user could lead to any file, and we may run as root.
        raise ConfigError(
            f'"{path}" is a symlink in a directory that others can write to', "name its target"
        )
    return os.path.realpath(path)


def _replace(path: str, data: bytes, mode: int) -> None:
    directory, name = os.path.split(path)
    try:
        old_status = os.stat(path)
    except FileNotFoundError:
        old_status = None
    if old_status is not None and not stat.S_ISREG(old_status.st_mode):
        # The rename would replace a device by a file, for every user of the device.
        raise ConfigError(f'"{path}" is not a regular file', "name a config file")
    dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        temporary = f"{_TEMPORARY}{os.urandom(8).hex()}"

        def finish(fd: int) -> None:
            if old_status is not None:
                _copy_attributes(fd, path, old_status)
            # After the owner: chown clears the set-id bits.
            os.fchmod(fd, mode if old_status is None else stat.S_IMODE(old_status.st_mode))
            os.fsync(fd)

        atomic_replace.replace(name, temporary, data, finish, dirfd)
        os.fsync(dirfd)
    finally:
        os.close(dirfd)


def _copy_attributes(fd: int, path: str, old_status: os.stat_result) -> None:
    """Copy the owner and the extended attributes, such as SELinux labels, of *path* to *fd*."""
    status = os.fstat(fd)
    if (old_status.st_uid, old_status.st_gid) != (status.st_uid, status.st_gid):
        os.fchown(fd, old_status.st_uid, old_status.st_gid)
    try:
        names = os.listxattr(path)
    except OSError:
        # The file system does not support extended attributes.
        return
    for name in names:
        try:
            os.setxattr(fd, name, os.getxattr(path, name))
        except OSError:
            # We may not set the attribute, or only the kernel can: the new file keeps its own.
            continue


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unreadable(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f'cannot read "{path}": {_reason(error)}', "make the file readable, or run as root"
    )


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
