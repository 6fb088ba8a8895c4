# SPDX-License-Identifier: Apache-2.0
"""Start a child process, exchange bytes with it until a deadline, and end all its processes.

On the start path. The supervision of the hook, in gpuruntime/launcher/supervise.h, is separate,
and does not share the clean-up of the runtime.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# How a child ended. By itself, by exit or by a signal.
ENDED = "ended"
# It was killed at the deadline, before the end of its output.
LATE = "late"
# It was killed at the deadline, after the end of its output.
STUCK = "stuck"
# It was killed because its output was larger than the limit.
FLOODED = "flooded"

# How long to wait for a killed process; SIGKILL may not end a process that waits in the driver.
_GRACE_S = 0.5
_STEP_S = 0.001
# How long to wait for the pipes of children: one whose pipe is held open by a process that it has
# started is noticed to have ended after that time.
_PIPES_STEP_S = 0.01
_CHUNK_BYTES = 1 << 16


class Outcome:
    """How a child ended, its exit status and its output.

    The status is negative for a signal, and None if unknown: a process that ignores SIGCHLD does
    not get the status of its children, and a child that SIGKILL does not end has no status.
    """

    __slots__ = ("how", "output", "status")

    def __init__(self, how: str, status: int | None, output: bytes) -> None:
        self.how = how
        self.status = status
        self.output = output


class Child:
    """A started child process that leads a process group, and our ends of its pipes."""

    __slots__ = ("_how", "_input", "_is_complete", "_output", "_pending", "_pid", "_text")

    def __init__(self, pid: int, output: int = -1, input_: int = -1, data: bytes = b"") -> None:
        self._pid = pid
        self._output = output
        self._input = input_
        self._pending = memoryview(data)
        self._is_complete = output < 0
        self._text = b""
        self._how = ""
        for fd in (output, input_):
            if fd >= 0:
                os.set_blocking(fd, False)

    @property
    def pid(self) -> int:
        """The process id, which is valid until the outcome is returned."""
        return self._pid

    def finish(
        self, deadline_s: float, limit: int, look: Callable[[], None] | None = None
    ) -> Outcome:
        """Return the outcome of this child; see the function `finish`."""
        return finish((self,), deadline_s, limit, look)[0]

    def advance(self, limit: int) -> bool:
        """Write and read without waiting; return whether there was progress."""
        # Checked first: the whole output of an ended child is then in the pipe.
        has_ended = self._has_ended()
        has_moved = self._write()
        if not self._is_complete:
            try:
                chunk = os.read(self._output, _CHUNK_BYTES)
            except BlockingIOError:
                # A process that the child has started may keep the pipe open.
                if has_ended:
                    self._how = ENDED
                return has_moved
            self._text += chunk
            if len(self._text) > limit:
                self._how = FLOODED
            self._is_complete = not chunk
            has_moved = True
        if self._is_complete and has_ended:
            self._how = ENDED
        return has_moved

    def pending(self) -> list[tuple[int, int]]:
        """Return the descriptors to wait for, and the event of `poll` for each."""
        events = []
        if self._input >= 0:
            events.append((self._input, select.POLLOUT))
        if self._output >= 0 and not self._is_complete:
            events.append((self._output, select.POLLIN))
        return events

    def is_done(self) -> bool:
        """Return whether the child has ended, or its output is larger than the limit."""
        return bool(self._how)

    def close(self) -> Outcome:
        """Kill the remaining processes of the child's group, and return the outcome."""
        # Before the pipes are closed: closing them would end a writing child by SIGPIPE.
        self._kill()
        for fd in (self._output, self._input):
            if fd >= 0:
                os.close(fd)
        self._output = self._input = -1
        how = self._how or (STUCK if self._is_complete else LATE)
        return Outcome(how, self._reap(), self._text)

    def _write(self) -> bool:
        """Write as much as the pipe accepts; return whether there was progress."""
        if self._input < 0:
            return False
        try:
            self._pending = self._pending[os.write(self._input, self._pending) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            # The child has closed its input; its output and status show the reason.
            self._pending = self._pending[:0]
        if not self._pending:
            os.close(self._input)
            self._input = -1
        return True

    def _has_ended(self) -> bool:
        """Return whether the child has ended, without taking its status.

        Until its status is taken, its process id cannot become that of another process or group.
        """
        if self._pid < 0:
            return True
        try:
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            # SIGCHLD is ignored, so the kernel has reaped the child. Its id may belong to another
            # process now and must not be used for a kill.
            self._pid = -1
            return True

    def _kill(self) -> None:
        """Kill the child and its process group."""
        if self._pid < 0:
            return
        for kill in (os.killpg, os.kill):
            try:
                kill(self._pid, _signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                # The child has ended, has not created its group yet, or has changed its user.
                continue

    def _reap(self) -> int | None:
        """Wait for the child, and return its exit status, None if unknown.

        A pending SIGCHLD is consumed, so that the program that we execute does not receive it.
        """
        end = time.monotonic() + _GRACE_S
        status = None
        try:
            while self._pid >= 0:
                pid, wait_status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    status = os.waitstatus_to_exitcode(wait_status)
                elif time.monotonic() < end:
                    time.sleep(_STEP_S)
                    continue
                self._pid = -1
        except ChildProcessError:
            self._pid = -1
        # If the engine has blocked the signal, it stays pending, also after exec.
        if _signal.SIGCHLD in _signal.sigpending():
            _signal.sigtimedwait((_signal.SIGCHLD,), 0)
        return status


def spawn(
    path: str,
    arguments: list[str],
    environment: dict[str, str],
    data: bytes,
    *,
    has_output: bool = True,
) -> Child:
    """Start the program *path* with *data* on its standard input; raise OSError.

    Its standard output is a pipe to us, or /dev/null; its standard error is /dev/null. No other
    descriptor is open.
    """
    fds: list[int] = []
    try:
        fds += os.pipe()
        if has_output:
            fds += os.pipe()
        nothing = "/dev/null", os.O_WRONLY, 0
        pid = os.posix_spawn(
            path,
            arguments,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, fds[0], 0),
                (os.POSIX_SPAWN_DUP2, fds[3], 1)
                if has_output
                else (os.POSIX_SPAWN_OPEN, 1, *nothing),
                (os.POSIX_SPAWN_OPEN, 2, *nothing),
            ],
            setpgroup=0,
            # The signal mask and dispositions of our caller must not disable the child's deadline.
            setsigmask=(),
            setsigdef=(_signal.SIGALRM, _signal.SIGPIPE, _signal.SIGCHLD),
        )
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    os.close(fds[0])
    if has_output:
        os.close(fds[3])
    return Child(pid, fds[2] if has_output else -1, fds[1], data)


def fork(body: Callable[[int], int]) -> Child:
    """Fork this process; the child calls *body* with a pipe, and exits with the returned status.

    For a child that needs our descriptors, or for which a new interpreter is too expensive. Call
    it in a process with one thread only. The child leads a session of its own. Raises OSError.
    """
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except BaseException:
        os.close(reader)
        os.close(writer)
        raise
    if pid == 0:
        status = 1
        try:
            os.setsid()
            os.close(reader)
            status = body(writer)
        finally:
            # The buffers and exit handlers of the parent must not be flushed or run here.
            os._exit(status)
    os.close(writer)
    return Child(pid, reader)


def _wait(events: list[tuple[int, int]]) -> None:
    """Wait a moment, not longer than until one of *events* has come."""
    if not events:
        time.sleep(_STEP_S)
        return
    poll = select.poll()
    for event in events:
        poll.register(*event)
    poll.poll(_PIPES_STEP_S * 1000)


def finish(
    children: Sequence[Child],
    deadline_s: float,
    limit: int,
    look: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Return the outcomes of *children*, in their order; all have *deadline_s* together.

    The output of each child is limited to about *limit* bytes. *look* is called repeatedly while
    there is nothing to read. In any case, all process groups are killed and all children reaped.
    """
    end = time.monotonic() + deadline_s
    outcomes: dict[Child, Outcome] = {}
    try:
        while len(outcomes) < len(children):
            is_over = time.monotonic() >= end
            has_moved = False
            for child in children:
                if child in outcomes:
                    continue
                has_moved |= child.advance(limit)
                if child.is_done() or is_over:
                    outcomes[child] = child.close()
                    has_moved = True
            if not has_moved:
                if look is not None:
                    look()
                _wait([event for child in children for event in child.pending()])
    finally:
        for child in children:
            if child not in outcomes:
                child.close()
    return [outcomes[child] for child in children]
