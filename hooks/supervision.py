# SPDX-License-Identifier: Apache-2.0
"""Have a child do a hook's work within a deadline, and say in one line how it ended.

A file system of the container that does not answer, served by FUSE for example, holds every
process that asks it, and no signal ends that. So the work is done in a child, which is abandoned
when its time is over. The runtime role shares none of this: it must be transparent, a hook trusts
nothing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import errno
import posix as os
import time

from gpuruntime.errors import BundleError, GpuRuntimeError, MountError, bug
from gpuruntime.system import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from hooks.entry import Work

# How long after its deadline the child is abandoned.
GRACE_S = 0.4
MIN_DESCRIPTORS = 64
MIN_PIDS, MIN_MEMORY_MIB = 8, 16
MAX_REPORT_BYTES = 64 << 10


class Deadline:
    """The time at which the hook gives up: `error` is then raised, wherever the hook is."""

    def __init__(self, seconds: int) -> None:
        self.end = time.monotonic() + seconds
        self._seconds = seconds
        self.error: Callable[[], GpuRuntimeError] = self.no_work

    def set_step(self, describe: Callable[[], str]) -> None:
        """Name in the error the step that *describe* returns in a line."""
        self.error = lambda: self.no_step(describe())

    def no_root(self) -> BundleError:
        """Return the error of a hook that has not come to the container's root."""
        return BundleError(
            "reading the state and opening the container's root was not done in "
            f"{self._seconds} s",
            "close standard input behind the state",
        )

    def no_work(self) -> MountError:
        """Return the error of a hook that is not done, whatever it does."""
        return self.no_step("")

    def no_step(self, step: str) -> MountError:
        """Return what to say where *step*, described in a line, is what takes too long."""
        return MountError(
            f"the work in the container's root was not done in {self._seconds} s"
            f"{step and f': it could not {step}'}",
            "look for a file system of the container that does not answer",
        )

    def set_alarm(self, grace: float = 0) -> None:
        """Raise the error in this process, *grace* seconds after the time."""
        _signal.signal(_signal.SIGALRM, self._give_up)
        left = self.end + grace - time.monotonic()
        _signal.setitimer(_signal.ITIMER_REAL, max(left, 0.001))

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        # Unwinds, so that nothing half-made is left.
        del number, frame
        raise self.error()


def supervise(work: Work, deadline: Deadline) -> tuple[str, int]:
    """Have a child do *work*; return what it says, and its status, or 1 if it is not done."""
    # The runtime waits for whoever holds its pipes: the child has only one of ours.
    us = os.getpid()
    try:
        report, stderr = os.pipe()
        child = os.fork()
    except OSError as error:
        raise _no_process(error) from error
    if child == 0:
        status = 1
        try:
            os.close(report)
            os.dup2(stderr, 2)
            os.close(stderr)
            status = _be_child(work, deadline, us)
        finally:
            os._exit(status)
    os.close(stderr)
    text = b""
    failure: GpuRuntimeError | None
    try:
        deadline.set_alarm(GRACE_S)
        while True:
            chunk = os.read(report, MAX_REPORT_BYTES)
            if not chunk:
                break
            text += chunk[: MAX_REPORT_BYTES - len(text)]
        _, status = os.waitpid(child, 0)
        failure = _failure(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None
    except MountError as error:
        _kill(child)
        failure = error
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
    said = text.decode("ascii", "backslashreplace").rstrip("\n")
    if failure is None:
        return said, os.WEXITSTATUS(status)
    last, status = explain(failure, work.program)
    return f"{said}\n{last}" if said else last, status


def _be_child(work: Work, deadline: Deadline, parent: int) -> int:
    """Do *work* in this process, the child of *parent*; return the exit status."""
    try:
        syscalls.die_with_parent()
        if os.getppid() != parent:
            # It ended before that.
            return 1
        os.setsid()
        null = os.open("/dev/null", os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        _be_first_victim()
        work.execute(deadline)
    except Exception as error:  # noqa: BLE001 (as above)
        text, status = explain(error, work.program)
        say(text)
        return status
    return 0


def _be_first_victim() -> None:
    """Have the kernel end this process where memory is short: then the other can say so."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"1000")
        finally:
            os.close(fd)
    except OSError:
        # Only the message would be better.
        pass


def _kill(child: int) -> None:
    """End *child* and what it has started."""
    for kill in (os.killpg, os.kill):
        try:
            kill(child, _signal.SIGKILL)
        except ProcessLookupError:
            # It has ended, or has no group of its own yet.
            pass


def _no_process(error: OSError) -> MountError:
    hint = f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more"
    if error.errno == errno.EAGAIN:
        hint = f"give the container a pids limit of {MIN_PIDS} or more"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        hint = f"allow the runtime {MIN_DESCRIPTORS} open files or more"
    return MountError(
        f"cannot start the process that works in the container's root: {error.strerror}", hint
    )


def _failure(number: int) -> MountError:
    """Return what to say of a child that signal *number* ended."""
    work = "the work in the container's root"
    if number == _signal.SIGSYS:
        return MountError(
            f"{work} was ended by the kernel: it made a system call that no hook needs",
            "report it with the kernel's audit record, which has the number of the call",
        )
    return MountError(
        f"{work} was ended by signal {number}",
        f"give the container a memory limit of {MIN_MEMORY_MIB} MiB or more"
        if number == _signal.SIGKILL
        else None,
    )


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


def say(text: str) -> None:
    """Write *text*, if there is any, to stderr, which the low-level runtime relays."""
    if not text:
        return
    try:
        os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
    except OSError:
        # What there is to say does not decide whether the container starts.
        pass
