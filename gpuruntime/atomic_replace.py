# SPDX-License-Identifier: Apache-2.0
"""Replace a whole file of ours or of an engine: a new file is renamed over the old one.

On the start path. Two similar functions are separate: system/paths.py works below the hostile root
of a container, and the package of cdi/store.py does not import this one.
"""

from __future__ import annotations

import posix as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def replace(
    name: str,
    temporary: str,
    data: bytes,
    finish: Callable[[int], None],
    dir_fd: int | None = None,
) -> None:
    """Replace the file *name* by a file with *data*, which is first written to *temporary*.

    Both names are relative to *dir_fd* if it is not None. The new file has mode 0600;
    *finish* is called with its descriptor, to set mode and owner and to sync the file if needed.
    Raises OSError, or the exception of *finish*; the old file is then unchanged, and the new one
    removed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=dir_fd)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            finish(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        try:
            os.unlink(temporary, dir_fd=dir_fd)
        except OSError:
            # Another process has removed the file or its directory. The first error is the cause.
            pass
        raise
