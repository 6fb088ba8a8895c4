# SPDX-License-Identifier: Apache-2.0
"""How long to wait before something that has ended is started again: pure."""

from __future__ import annotations


class BackOff:
    """The delays double from *first_s* to *most_s*, and begin again after *quiet_s* of work."""

    def __init__(self, first_s: float = 0.5, most_s: float = 30.0, quiet_s: float = 60.0) -> None:
        self.first_s = first_s
        self.most_s = most_s
        self.quiet_s = quiet_s
        self._next_s = first_s

    def delay(self, lasted_s: float) -> float:
        """Return the seconds to wait after a run of *lasted_s* seconds."""
        if lasted_s >= self.quiet_s:
            self._next_s = self.first_s
        delay_s = self._next_s
        self._next_s = min(delay_s * 2, self.most_s)
        return delay_s
