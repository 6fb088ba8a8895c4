# SPDX-License-Identifier: Apache-2.0
"""Notice changes in a directory by inotify, where the kernel can, on the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from inotify_simple import INotify, flags

MASK = (
    flags.CREATE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.DELETE
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)


class DirectoryWatch:
    """Calls *changed* after each change of the names in the directory *path*.

    `refresh` follows a directory that was replaced, and one behind a symlink that now leads
    elsewhere.
    """

    def __init__(self, path: str, changed: Callable[[], None]) -> None:
        self.path = path
        self.changed = changed
        self._inotify: INotify | None = None
        self._watched: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Watch the directory that the path names now; return whether it is watched."""
        try:
            status = os.stat(self.path)
        except OSError:
            self.close()
            return False
        identity = (status.st_dev, status.st_ino)
        if identity == self._watched:
            return True
        self.close()
        try:
            self._inotify = INotify(nonblocking=True)
            self._inotify.add_watch(self.path, MASK)
        except OSError:
            # No inotify on this file system, or the user's limit: the caller polls.
            self.close()
            return False
        asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._read)
        self._watched = identity
        # Between `stat` and the watch the directory may have been replaced, or a name may have
        # been added.
        self.changed()
        return True

    def _read(self) -> None:
        assert self._inotify is not None
        try:
            events = self._inotify.read(timeout=0)
        except OSError:
            events = []
            self.close()
        if any(event.mask & (flags.IGNORED | flags.MOVE_SELF) for event in events):
            self.close()
        self.changed()

    def close(self) -> None:
        """End the watch."""
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
        self._inotify = None
        self._watched = None
