# SPDX-License-Identifier: Apache-2.0
"""A hook's time: what the process that works tells the launcher, which waits for it.

A file system of the container that does not answer, served by FUSE for example, holds every
process that asks it, and no signal ends that. So this process is a child of the launcher, which
abandons it when its time is over (gpuruntime/launcher/supervise.h).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import posix as os
import sys
import time

from gpuruntime.errors import BundleError, MountError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from gpuruntime.errors import GpuRuntimeError

# The descriptor on which the launcher reads deadlines: a number of seconds each, of 8 bytes.
DEADLINES = 3
MAX_DEADLINE_S = 600


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


def expect(seconds: int) -> None:
    """Have the launcher wait for this process for *seconds* from now."""
    try:
        os.write(DEADLINES, seconds.to_bytes(8, sys.byteorder))
    except OSError:
        # Python was started without the launcher, by a test: nobody waits but for our end.
        pass


def detach() -> None:
    """Hold nothing of the caller's output, and end first where memory is short.

    The runtime waits for whoever holds its pipes; the launcher can say what has happened.
    """
    null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, 1)
    os.close(null)
    try:
        os.close(DEADLINES)
    except OSError:
        # As in `expect`.
        pass
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"1000")
        finally:
            os.close(fd)
    except OSError:
        # Only the message would be better.
        pass
