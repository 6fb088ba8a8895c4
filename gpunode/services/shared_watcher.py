# SPDX-License-Identifier: Apache-2.0
"""One watcher for several services of a process."""

from __future__ import annotations

from types import TracebackType

from gpunode.services.observation import Measuring


class SharedWatcher:
    """The running *watcher* as a context: the end of the context does not end the watcher."""

    def __init__(self, watcher: Measuring) -> None:
        self.watcher = watcher

    async def __aenter__(self) -> Measuring:
        return self.watcher

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the watcher to the other services."""
