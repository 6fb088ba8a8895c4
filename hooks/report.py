# SPDX-License-Identifier: Apache-2.0
"""What a hook says: to the engine, to our log of hooks, and to the launcher, which waits for it.

The program of this module is the report of the launcher on the process that did the work, which
ended without one of its own: `main`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import errno
import posix as os
import sys

from cdi.pathnames import basename
from gpuruntime.errors import GpuRuntimeError, MountError, bug
from gpuruntime.snapshots import hook_log
from gpuruntime.system import syscalls
from hooks.supervision import late

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MIN_DESCRIPTORS = 64
MIN_PIDS, MIN_MEMORY_MIB = 8, 16
GRACE_S = 0.4
_WORK = "the work in the container's root"


class Report:
    """What this process says.

    If it *is_supervised*, its standard output and error are pipes to the launcher.
    """

    def __init__(self, *, is_supervised: bool = False) -> None:
        self._is_supervised = is_supervised

    def expect(self, seconds: int) -> None:
        """Have the launcher wait for this process for *seconds* from now: supervise.h."""
        if self._is_supervised:
            os.write(1, seconds.to_bytes(8, sys.byteorder))

    def say(self, text: str, status: int = 0) -> None:
        """Write *text*, if there is any, to stderr, which the low-level runtime relays.

        Our log of hooks gets it too, as that of a hook which ends with *status*.
        """
        if not text:
            return
        try:
            os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
        except OSError:
            # What there is to say does not decide whether the container starts.
            pass
        hook_log.record(text, status)


def main(_cli_python: str = "") -> None:
    """Say how the process that did the work has ended; never returns.

    `sys.argv` is ['-c', argv[0], HOW, NUMBER, …]: "errno", it was not started; "not-started", our
    code did not run in it after so many seconds; "late", it was abandoned after so many seconds;
    "signal", one of that number ended it.
    """
    _, program, how, number = sys.argv[:4]
    status = 1
    try:
        syscalls.set_undumpable()
        text, status = explain(FAILURES[how](int(number)), basename(program))
        # Standard error is that of the caller, who may not read it.
        _signal.signal(_signal.SIGALRM, _stop_writing)
        _signal.setitimer(_signal.ITIMER_REAL, GRACE_S)
        Report().say(text, status)
    finally:
        os._exit(status)


def _stop_writing(*_: object) -> None:
    raise InterruptedError


def explain(error: Exception, program: str) -> tuple[str, int]:
    """Return what to say of *error*, and the exit status."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        error = MountError(
            "the memory is not enough for the hook",
            f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more",
        )
    elif getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        error = MountError(
            "there are too few descriptors for the hook",
            f"allow the runtime {MIN_DESCRIPTORS} open files or more",
        )
    elif isinstance(error, ImportError):
        error = GpuRuntimeError(f"cannot load the hook: {error}", "install gpuruntime again")
    reported = error if isinstance(error, GpuRuntimeError) else bug(error)
    return f"{program}: {reported.lines()}", reported.exit_code


def not_started(code: int) -> MountError:
    """Return what to say where the system refuses the process that is to work, by errno *code*."""
    hint = f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more"
    if code == errno.EAGAIN:
        hint = f"give the container a pids limit of {MIN_PIDS} or more"
    elif code in (errno.EMFILE, errno.ENFILE):
        hint = f"allow the runtime {MIN_DESCRIPTORS} open files or more"
    return MountError(
        f"cannot start the process that works in the container's root: {os.strerror(code)}", hint
    )


def not_reached(seconds: int) -> GpuRuntimeError:
    """Return what to say where Python has not come to our code in *seconds*."""
    return GpuRuntimeError(
        f"Python did not start the hook in {seconds} s",
        f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more, and more CPU time",
    )


def killed(number: int) -> MountError:
    """Return what to say of a process that signal *number* ended."""
    if number == _signal.SIGSYS:
        return MountError(
            f"{_WORK} was ended by the kernel: it made a system call that no hook needs",
            "report it with the kernel's audit record, which has the number of the call",
        )
    return MountError(
        f"{_WORK} was ended by signal {number}",
        f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more"
        if number == _signal.SIGKILL
        else None,
    )


# How the process that did the work has ended → what to say of it.
FAILURES: dict[str, Callable[[int], GpuRuntimeError]] = {
    "errno": not_started,
    "not-started": not_reached,
    "late": late,
    "signal": killed,
}
