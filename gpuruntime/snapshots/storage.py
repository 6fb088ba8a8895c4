# SPDX-License-Identifier: Apache-2.0
"""Read and replace the files below /run/gpuruntime: only trusted ones are read; writes are atomic.

On the start path. Every file there only saves time: a create that cannot read or write one does
the work again.
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
    """Make the directory *path* for what we keep, if there is none; raise OSError."""
    try:
        # Not even for a moment may others put something there.
        os.mkdir(path, 0o755)
    except FileExistsError:
        return
    # Whatever the engine's umask is: a rootless engine reads what is in it, too.
    os.chmod(path, 0o755)


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
    try:
        make_directory(directory)
        if may_trust(os.stat(directory)):
            atomic_replace.replace(
                f"{directory}/{name}", temporary, data, lambda fd: os.fchmod(fd, mode)
            )
    except OSError:
        return
