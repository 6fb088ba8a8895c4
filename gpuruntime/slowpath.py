# SPDX-License-Identifier: Apache-2.0
"""The one door from the start path to expensive work: a child with the CLI's interpreter.

The child reads TOML and YAML and queries the driver; it answers in JSON (slowpath_server.py). The
process that becomes the low-level runtime is still the one that the engine started.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import errno
import os
import time

from cdi import strictjson
from gpuruntime.errors import DriverError, GpuRuntimeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
MAX_ANSWER_BYTES = 64 << 20
DEADLINE_S = 30
# The child has a deadline of its own, and says so; ours is for one that cannot.
_GRACE_S = 2
_STEP_S = 0.002
# For these, the driver's modules have work to do.
_OF_DRIVER = ("discover", "make-nodes")
_HINT = 'run "{} -m gpuruntime.slowpath_server {}" to see why'


def ask(cli_python: str, question: str, argument: object, deadline_s: float = DEADLINE_S) -> Any:  # noqa: ANN401 (JSON)
    """Return the answer of `gpuruntime.slowpath_server` to *question* about *argument*.

    *cli_python* is the interpreter, or the words of its command with line feeds between. Raises
    GpuRuntimeError if that cannot be started or gives no answer, DriverError if the driver is
    asked and takes longer than *deadline_s*: then the child is left to die, which the kernel may
    put off.
    """
    words = cli_python.split("\n")
    command = " ".join(words)
    question_read = question_write = answer_read = answer_write = -1
    try:
        try:
            question_read, question_write = os.pipe()
            answer_read, answer_write = os.pipe()
            arguments = [
                *(*words, "-I", "-B", "-X", "utf8", "-m", "gpuruntime.slowpath_server"),
                *(question, f"{deadline_s:g}"),
            ]
            pid = spawn(words[0], arguments, ENVIRONMENT, question_read, answer_write)
        except OSError as error:
            hint = 'run "make setup" or install gpuruntime again'
            if error.errno == errno.EMFILE:
                hint = "let the engine have more open files: RLIMIT_NOFILE"
            raise GpuRuntimeError(f'cannot start "{command}": {error.strerror}', hint) from error
        os.close(question_read)
        os.close(answer_write)
        question_read = answer_write = -1
        talk = _Talk(question_write, strictjson.dumps(argument).encode(), answer_read)
        question_write = answer_read = -1
        output = talk.finish(deadline_s + _GRACE_S)
    finally:
        for fd in (question_read, question_write, answer_read, answer_write):
            if fd >= 0:
                os.close(fd)
    if output is None:
        os.kill(pid, _signal.SIGKILL)
        reap(pid, os.WNOHANG)
    elif reap(pid, 0) == _signal.SIGALRM:
        # It was late, and ended by its own deadline.
        output = None
    if output is None:
        raise _late(command, question, deadline_s)
    try:
        return strictjson.loads(output)
    except ValueError:
        raise GpuRuntimeError(
            f'"{command}" did not answer the question "{question}"',
            _HINT.format(command, question),
        ) from None


def spawn(
    path: str,
    arguments: list[str],
    environment: dict[str, str],
    stdin: int,
    stdout: int | None = None,
) -> int:
    """Start the program *path* as a child, nothing but what it is given open; raise OSError."""
    nothing = "/dev/null", os.O_WRONLY, 0
    return os.posix_spawn(
        path,
        arguments,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_OPEN, 1, *nothing)
            if stdout is None
            else (os.POSIX_SPAWN_DUP2, stdout, 1),
            (os.POSIX_SPAWN_OPEN, 2, *nothing),
        ],
        # The engine's mask and dispositions must not keep the child's deadline from it.
        setsigmask=(),
        setsigdef=(_signal.SIGALRM, _signal.SIGPIPE, _signal.SIGCHLD),
    )


def _late(command: str, question: str, deadline_s: float) -> GpuRuntimeError:
    if question in _OF_DRIVER:
        return DriverError(
            f"the driver did not answer in {deadline_s:g} s",
            'look for NVRM and Xid lines in "dmesg"',
        )
    return GpuRuntimeError(
        f'"{command}" did not answer the question "{question}" in {deadline_s:g} s',
        _HINT.format(command, question),
    )


class _Talk:
    """Writes a question and reads an answer at the same time; owns both descriptors."""

    def __init__(self, write_fd: int, question: bytes, read_fd: int) -> None:
        self._write_fd = write_fd
        self._rest = memoryview(question)
        self._read_fd = read_fd
        os.set_blocking(write_fd, False)
        os.set_blocking(read_fd, False)

    def finish(self, deadline_s: float) -> bytes | None:
        """Return the answer, b"" if it is too long, None if it is not there in *deadline_s*."""
        end = time.monotonic() + deadline_s
        answer = b""
        try:
            while len(answer) <= MAX_ANSWER_BYTES:
                wrote = self._write()
                try:
                    chunk = os.read(self._read_fd, 1 << 16)
                except BlockingIOError:
                    if time.monotonic() >= end:
                        return None
                    if not wrote:
                        time.sleep(_STEP_S)
                    continue
                if not chunk:
                    return answer
                answer += chunk
            return b""
        finally:
            os.close(self._read_fd)
            if self._write_fd >= 0:
                os.close(self._write_fd)

    def _write(self) -> bool:
        """Write what the pipe takes; return whether that was anything."""
        if self._write_fd < 0:
            return False
        try:
            self._rest = self._rest[os.write(self._write_fd, self._rest) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            # The child died; that it does not answer is reported.
            self._rest = self._rest[:0]
        if not self._rest:
            os.close(self._write_fd)
            self._write_fd = -1
        return True


def reap(pid: int, options: int) -> int:
    """Wait for the child and return the signal that ended it, 0 if none did that is known.

    No SIGCHLD of it is left for the low-level runtime to find.
    """
    status = 0
    try:
        _, status = os.waitpid(pid, options)
    except ChildProcessError:
        # An engine that ignores SIGCHLD has it reaped by the kernel.
        pass
    # Only an engine that blocks the signal leaves it pending; that would outlive the exec.
    if _signal.SIGCHLD in _signal.sigpending():
        _signal.sigtimedwait((_signal.SIGCHLD,), 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
