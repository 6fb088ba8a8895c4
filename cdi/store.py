# SPDX-License-Identifier: Apache-2.0
"""Read a CDI spec from a file, and save one: temporary file in the same directory, fsync, rename.

A writer that dies leaves at most its temporary file. Scanners ignore that file because of its
extension, and the next writer removes it; a running writer holds a lock on its own file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cdi import document, generate
from cdi.errors import CdiError
from cdi.registry import DEFAULT_DIRECTORIES, ENDINGS, MAX_SPEC_BYTES, text_of

SPEC_MODE = 0o644
DIRECTORY_MODE = 0o755

# Only our own files: the reference library uses at most ten decimal digits, and no locks.
_TEMPORARY = re.compile(r"spec\.[0-9a-f]{16}\.tmp\Z")


def read(source: str | int) -> str:
    """Return the text of the file *source*, a path or a descriptor to read.

    Raises CdiError "syntax" if it is not a regular file, too long or not UTF-8, and OSError.
    """
    if isinstance(source, int):
        data = _read(source)
    else:
        # O_NONBLOCK: a FIFO must not hang us.
        fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CdiError("syntax", "not a regular file")
            data = _read(fd)
        finally:
            os.close(fd)
    return text_of(data)


def save_spec(
    document_: object,
    name: str,
    directories: Sequence[str] = DEFAULT_DIRECTORIES,
    *,
    may_trust: Callable[[os.stat_result], bool],
    replace: bool = True,
) -> str:
    """Write *document_* as *name* to the last of *directories*, and return the path.

    The text is JSON if *name* ends in `.json`, else YAML; a missing `.yaml` is appended.
    Raises CdiError "file-name", and as `save_document` does.
    """
    path = _path(name, directories)
    save_document(document_, path, may_trust=may_trust, replace=replace)
    return path


def save_document(
    document_: object,
    path: str,
    *,
    may_trust: Callable[[os.stat_result], bool],
    replace: bool = True,
    make_directory: bool = True,
) -> bool:
    """Write *document_* to *path* and return whether that changed the file.

    The text is JSON if *path* ends in `.json`, else YAML.
    A document that would not load is refused before anything is written. Raises CdiError with a
    loader's category, and as `save` does.
    """
    checked = generate.canonical(document.check(document_))
    text = generate.encode(checked, "json" if path.endswith(".json") else "yaml")
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise CdiError("syntax", f"larger than {MAX_SPEC_BYTES} bytes")
    # PyYAML takes long to import, and `save` alone does not need it.
    from cdi import yamlio  # noqa: PLC0415

    # Readers lose some annotations, such as one with a key of 2000 characters.
    if generate.canonical(document.check(yamlio.decode(text))) != checked:
        raise CdiError("syntax", "readers would not see the same document")
    return save(path, text, may_trust=may_trust, replace=replace, make_directory=make_directory)


def remove(
    name: str,
    directories: Sequence[str] = DEFAULT_DIRECTORIES,
    *,
    may_trust: Callable[[os.stat_result], bool],
) -> bool:
    """Remove the file that `save_spec` wrote as *name*; return whether it existed.

    Raises CdiError "file-name" or "untrusted", and OSError.
    """
    directory, file_name = os.path.split(_path(name, directories))
    try:
        with _directory(directory, may_trust) as dirfd:
            os.unlink(file_name, dir_fd=dirfd)
            os.fsync(dirfd)
    except FileNotFoundError:
        return False
    return True


def save(
    path: str,
    text: str,
    *,
    may_trust: Callable[[os.stat_result], bool],
    replace: bool = True,
    make_directory: bool = True,
) -> bool:
    """Write *text* to *path* atomically; return whether that changed the file.

    With *make_directory*, missing directories of *path* are created (0755). An existing file is
    replaced, never written to: it may be a symlink or have hard links. Raises CdiError
    "untrusted" if other users could replace the file, FileExistsError if the file exists and
    *replace* is false, FileNotFoundError for a missing directory, and OSError.
    """
    directory, name = os.path.split(os.path.abspath(path))
    if make_directory:
        _make(directory)
    with _directory(directory, may_trust) as dirfd:
        _sweep(dirfd)
        data = text.encode()
        if replace and _holds(name, dirfd, data):
            return False
        fd, temporary = _create(dirfd)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fchmod(fd, SPEC_MODE)
                os.fsync(fd)
                if replace:
                    os.rename(temporary, name, src_dir_fd=dirfd, dst_dir_fd=dirfd)
                else:
                    # Unlike rename, link fails if the file exists.
                    os.link(temporary, name, src_dir_fd=dirfd, dst_dir_fd=dirfd)
                    os.unlink(temporary, dir_fd=dirfd)
            finally:
                os.close(fd)
        except BaseException:
            _discard(temporary, dirfd)
            raise
        os.fsync(dirfd)
        return True


def _path(name: str, directories: Sequence[str]) -> str:
    """Return the path of the spec *name*; raise CdiError "file-name" if it is not a file name."""
    stem = name.removesuffix(".json").removesuffix(".yaml")
    # A kind with two slashes gives a name with one, which leads to another directory.
    if not stem.strip(".") or "/" in name or "\0" in name:
        raise CdiError("file-name", f'"{name}" is not a name for a file in a spec directory')
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise CdiError("file-name", "the file name is not text") from error
    directory = (directories or DEFAULT_DIRECTORIES)[-1]
    return os.path.join(directory, name if name.endswith(ENDINGS) else f"{name}.yaml")


def _read(fd: int) -> bytes:
    """Return the content of *fd*, at most one byte more than a spec may have."""
    data = bytearray()
    while len(data) <= MAX_SPEC_BYTES:
        chunk = os.read(fd, MAX_SPEC_BYTES + 1 - len(data))
        if not chunk:
            break
        data += chunk
    return bytes(data)


def _make(directory: str) -> None:
    """Create *directory* and its missing parents with mode 0755."""
    if os.path.isdir(directory):
        return
    _make(os.path.dirname(directory))
    try:
        os.mkdir(directory, DIRECTORY_MODE)
    except FileExistsError:
        # Another process created it, or it is not a directory, which `_directory` reports.
        return
    # Regardless of the umask: consumers that are not root read specs too.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(fd, DIRECTORY_MODE)
    finally:
        os.close(fd)


@contextmanager
def _directory(path: str, may_trust: Callable[[os.stat_result], bool]) -> Iterator[int]:
    """Open the directory *path* for the block.

    Raises CdiError "untrusted" if other users could replace a file of ours in it, and for a
    symlink, whose target may change.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        dirfd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            raise CdiError("untrusted", f'"{path}" is a symlink') from error
        raise
    try:
        status = os.fstat(dirfd)
        if not may_trust(_for_replacing(status)):
            mode = stat.S_IMODE(status.st_mode)
            text = f'"{path}" (owner uid {status.st_uid}, mode {mode:04o}) lets other users'
            raise CdiError("untrusted", f"{text} replace files in it")
        yield dirfd
    finally:
        os.close(dirfd)


def _for_replacing(status: os.stat_result) -> os.stat_result:
    """Return the *status* of a directory with the mode bits of users who can replace our files.

    In a sticky directory, such as /tmp, only root, the directory's owner and the file's can.
    """
    mode, *rest = status
    if mode & stat.S_ISVTX:
        mode &= ~(stat.S_IWGRP | stat.S_IWOTH)
    return os.stat_result((mode, *rest))


def _create(dirfd: int) -> tuple[int, str]:
    """Return the descriptor and name of a new temporary file that is locked."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        name = f"spec.{os.urandom(8).hex()}.tmp"
        fd = os.open(name, flags, 0o600, dir_fd=dirfd)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError:
                # The file system has no locks, so that no writer can sweep the file.
                return fd, name
            # Before it was locked, another writer may have swept it as abandoned.
            if os.fstat(fd).st_nlink:
                return fd, name
        except BaseException:
            os.close(fd)
            _discard(name, dirfd)
            raise
        os.close(fd)


def _sweep(dirfd: int) -> None:
    """Remove our temporary files whose writers have died."""
    for name in os.listdir(dirfd):
        if _TEMPORARY.match(name):
            _sweep_one(name, dirfd)


def _sweep_one(name: str, dirfd: int) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=dirfd)
    except OSError:
        # Removed since, a symlink, or another user's.
        return
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under the lock: a writer that waits for it checks its file's links afterwards.
            os.unlink(name, dir_fd=dirfd)
    except OSError:
        # Locked, or it cannot be removed: the file is harmless.
        return
    finally:
        os.close(fd)


def _discard(temporary: str, dirfd: int) -> None:
    """Remove *temporary* if possible; a file that stays is harmless."""
    try:
        os.unlink(temporary, dir_fd=dirfd)
    except OSError:
        return


def _holds(name: str, dirfd: int, data: bytes) -> bool:
    """Return whether *name* is already a regular file of mode 0644 that holds *data*."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=dirfd)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != SPEC_MODE:
            return False
        if status.st_nlink != 1 or status.st_size != len(data):
            return False
        if status.st_uid != os.geteuid():
            # Its owner may change it, so consumers would not use it.
            return False
        return os.read(fd, len(data) + 1) == data
    finally:
        os.close(fd)
