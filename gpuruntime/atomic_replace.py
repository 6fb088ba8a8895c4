# SPDX-License-Identifier: Apache-2.0
"""Replace a file of ours or of an engine whole: a new file is renamed over the old one.

On the start path. Two others stay apart: system/paths.py works below a container's root, which is
hostile, and cdi/store.py is in a package that imports nothing of this one.
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
    """Put *data* into the file *name* by way of the new file *temporary* beside it.

    Both are relative to *dir_fd* if there is one. The new file has mode 0600 until *finish*, which
    is given its descriptor, sets mode and owner, and syncs it if that is wanted. Raises OSError,
    or what *finish* raises; the old file is then unchanged, and the new one is removed.
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
            # Somebody else has removed it, or its directory. The first error is the cause.
            pass
        raise
