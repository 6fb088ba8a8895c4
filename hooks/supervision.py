# SPDX-License-Identifier: Apache-2.0
"""A hook's time, which the process that works keeps, and of which it tells the launcher.

A file system of the container that does not answer, served by FUSE for example, holds every
process that asks it, and no signal ends that. So this process is a child of the launcher, which
abandons it when its time is over (gpuruntime/launcher/supervise.h).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import time

from gpuruntime.errors import BundleError, MountError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from gpuruntime.errors import GpuRuntimeError


class Deadline:
    """The time at which the hook gives up: `error` is then raised, wherever the hook is."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._is_over = False
        self.error: Callable[[], GpuRuntimeError] = self.no_work

    def set_step(self, describe: Callable[[], str]) -> None:
        """Name in the error the step that *describe* returns in a line."""
        self.error = lambda: late(self.seconds, describe())

    def no_root(self) -> BundleError:
        """Return the error of a hook that has not come to the container's root."""
        return BundleError(
            f"reading the state and opening the container's root was not done in {self.seconds} s",
            "close standard input behind the state",
        )

    def no_work(self) -> MountError:
        """Return the error of a hook that is not done, whatever it does."""
        return late(self.seconds)

    def set_alarm(self) -> None:
        """Raise the error in this process after the time."""
        _signal.signal(_signal.SIGALRM, self._give_up)
        left = self._end - time.monotonic()
        _signal.setitimer(_signal.ITIMER_REAL, max(left, 0.001))

    def disarm(self) -> None:
        """Raise nothing from here on: the work has ended. Makes no system call."""
        self._is_over = True

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        # Unwinds, so that nothing half-made is left.
        del number, frame
        if not self._is_over:
            raise self.error()


def late(seconds: int, step: str = "") -> MountError:
    """Return what to say where *step*, described in a line, is what takes too long."""
    return MountError(
        f"the work in the container's root was not done in {seconds} s"
        f"{step and f': it could not {step}'}",
        "look for a file system of the container that does not answer",
    )
