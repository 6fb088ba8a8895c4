# SPDX-License-Identifier: Apache-2.0
"""The one door from the start path to what is expensive: a child with the CLI's interpreter.

What is behind it (TOML, YAML) takes text and gives JSON; see gpuruntime/slow.py. Only a helper
child is forked: the process that becomes the low-level runtime stays the one the engine started.
"""

from __future__ import annotations

import json
import os
import signal

from gpuruntime.errors import GpuRuntimeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
MAX_ANSWER_BYTES = 64 << 20


def ask(cli_python: str, question: str, argument: object) -> Any:  # noqa: ANN401 (JSON)
    """Return the answer of `gpuruntime.slow` to *question* about *argument*.

    Raises GpuRuntimeError if the interpreter cannot be started or gives no answer. The child ends
    itself after slow.DEADLINE_S seconds, so this never hangs.
    """
    question_read, question_write = os.pipe()
    answer_read, answer_write = os.pipe()
    try:
        try:
            pid = os.posix_spawn(
                cli_python,
                [cli_python, "-I", "-B", "-X", "utf8", "-m", "gpuruntime.slow", question],
                ENVIRONMENT,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, question_read, 0),
                    (os.POSIX_SPAWN_DUP2, answer_write, 1),
                    (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
                ],
                # The engine's mask and dispositions must not keep the child's deadline from it.
                setsigmask=(),
                setsigdef=(signal.SIGALRM, signal.SIGPIPE),
            )
        except OSError as error:
            raise GpuRuntimeError(
                f'cannot start "{cli_python}": {error.strerror}',
                'run "make setup" or install gpuruntime again',
            ) from error
        os.close(question_read)
        os.close(answer_write)
        question_read = answer_write = -1
        _write_all(question_write, json.dumps(argument).encode())
        os.close(question_write)
        question_write = -1
        output = _read_all(answer_read)
    finally:
        for fd in (question_read, question_write, answer_read, answer_write):
            if fd >= 0:
                os.close(fd)
    _reap(pid)
    try:
        return json.loads(output)
    except ValueError:
        raise GpuRuntimeError(
            f'"{cli_python}" did not answer the question "{question}"',
            f'run "{cli_python} -m gpuruntime.slow {question}" to see why',
        ) from None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        # The child died; that it does not answer is reported.
        pass


def _read_all(fd: int) -> bytes:
    data = b""
    while len(data) <= MAX_ANSWER_BYTES:
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return data
        data += chunk
    return b""


def _reap(pid: int) -> None:
    """Wait for the child, and leave no SIGCHLD of it for the low-level runtime to find."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        # An engine that ignores SIGCHLD has it reaped by the kernel.
        pass
    # Only an engine that blocks the signal leaves it pending; that would outlive the exec.
    if signal.SIGCHLD in signal.sigpending():
        signal.sigtimedwait((signal.SIGCHLD,), 0)
