# SPDX-License-Identifier: Apache-2.0
"""How long to wait before something that failed is tried again: pure but for random numbers."""

from __future__ import annotations

from collections.abc import Callable


class BackOff:
    """The delays double from *first_s* to *most_s*, and begin again after *quiet_s* of work.

    With *draw*, which returns numbers from 0 to 1, a delay is between its half and all of it.
    An API server that does not answer fails all nodes of a cluster at the same time: without that
    they would try again at the same time.
    """

    def __init__(
        self,
        first_s: float = 0.5,
        most_s: float = 30.0,
        quiet_s: float = 60.0,
        draw: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.first_s = first_s
        self.most_s = most_s
        self.quiet_s = quiet_s
        self.draw = draw
        self._next_s = first_s

    def delay(self, lasted_s: float) -> float:
        """Return the seconds to wait after a run of *lasted_s* seconds."""
        if lasted_s >= self.quiet_s:
            self.reset()
        delay_s = self._next_s
        self._next_s = min(delay_s * 2, self.most_s)
        return delay_s * (0.5 + self.draw() / 2)

    def reset(self) -> None:
        """Begin again with the shortest delay."""
        self._next_s = self.first_s
