# SPDX-License-Identifier: Apache-2.0
"""What a hook says: in one line why it failed, for the engine and for our log of hooks.

The program of this module is the report of the launcher on the process that did the work, which
ended without one of its own: `main`.
"""

from __future__ import annotations

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
    from typing import NoReturn

MIN_DESCRIPTORS = 64
MIN_PIDS, MIN_MEMORY_MIB = 8, 16
_SIGKILL, _SIGSYS = 9, 31
_WORK = "the work in the container's root"


class Report:
    """What this process has said; at its end our log gets it as well."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def say(self, text: str) -> None:
        """Write *text*, if there is any, to stderr, which the low-level runtime relays."""
        if not text:
            return
        self._texts.append(text)
        try:
            os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
        except OSError:
            # What there is to say does not decide whether the container starts.
            pass

    def leave(self, status: int) -> NoReturn:
        """Have our log keep what was said, and exit with *status*."""
        try:
            if self._texts:
                hook_log.record("\n".join(self._texts), status)
        finally:
            # Nothing is buffered, and Python's own end would take longer than many a step.
            os._exit(status)


def main(_cli_python: str = "") -> None:
    """Say how the process that did the work has ended; never returns.

    `sys.argv` is ['-c', argv[0], HOW, NUMBER, …]: "errno", it was not started; "late", it was
    abandoned after so many seconds; "signal", one of that number ended it.
    """
    _, program, how, number = sys.argv[:4]
    report = Report()
    status = 1
    try:
        syscalls.set_undumpable()
        text, status = explain(FAILURES[how](int(number)), basename(program))
        report.say(text)
    finally:
        report.leave(status)


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


def killed(number: int) -> MountError:
    """Return what to say of a process that signal *number* ended."""
    if number == _SIGSYS:
        return MountError(
            f"{_WORK} was ended by the kernel: it made a system call that no hook needs",
            "report it with the kernel's audit record, which has the number of the call",
        )
    return MountError(
        f"{_WORK} was ended by signal {number}",
        f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more"
        if number == _SIGKILL
        else None,
    )


# How the process that did the work has ended → what to say of it.
FAILURES: dict[str, Callable[[int], MountError]] = {
    "errno": not_started,
    "late": late,
    "signal": killed,
}
