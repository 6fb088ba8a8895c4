# SPDX-License-Identifier: Apache-2.0
"""Read and replace the files below /run/gpuruntime: only trusted files, atomic writes.

On the start path. These files only save time: a create that cannot read or write one does the work
again.
"""

from __future__ import annotations

import _stat as stat
import posix as os

from cdi import strictjson
from gpuruntime import atomic_replace, snapshots
from gpuruntime.trusted_files import may_trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RUN_DIRECTORY = snapshots.RUN_DIRECTORY


def make_directory(path: str) -> None:
    """Create the directory *path* if it does not exist; raise OSError."""
    try:
        # With this mode from the start: other users must never be able to write to it.
        os.mkdir(path, 0o755)
    except FileExistsError:
        return
    # Whatever the umask of the engine: rootless engines read the files, too.
    os.chmod(path, 0o755)


def read_object(directory: str, name: str, max_bytes: int) -> dict[str, Any] | None:
    """Return the JSON object in a trusted file *name* of *directory*, None if there is none."""
    return object_of(read_trusted(directory, name, max_bytes))


def object_of(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object *data*, None if it is not one."""
    # For a missing file no error is made: its message would cost an import of `json`.
    if not data:
        return None
    try:
        value = strictjson.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_trusted(directory: str, name: str, max_bytes: int) -> bytes:
    """Return the bytes of the file *name* of *directory*, b"" if missing or not trusted."""
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
    """Replace the file *name* of *directory* by *data*; leave it unchanged if that fails.

    The file has *mode*, by default readable for everyone. No error is raised: the file only saves
    time for the next create.
    """
    temporary = f"{directory}/.{name}.{os.urandom(8).hex()}"
    try:
        make_directory(directory)
        if may_trust(os.stat(directory)):
            atomic_replace.replace(
                f"{directory}/{name}", temporary, data, lambda fd: os.fchmod(fd, mode)
            )
    except OSError:
        return
