# SPDX-License-Identifier: Apache-2.0
"""Run hooks before the low-level runtime, for a container whose root crun makes read-only first.

On the start path, for the creates that gpuruntime/plan/early_commands.py selects. A failure here
changes nothing: the same hook runs again at its usual time, and does what is missing or fails with
the reason.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import os
import time

from cdi import strictjson
from gpuruntime import slowpath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuruntime.plan.early_commands import Command

_GRACE_S = 1
_STEP_S = 0.002
# The capacity that every pipe has.
_MAX_STATE_BYTES = 4096


def run(found: Sequence[Command], bundle: str) -> None:
    """Run the commands *found* for the container in *bundle*, one after the other."""
    state = {"ociVersion": "1.0.2", "status": "creating", "bundle": os.path.realpath(bundle)}
    data = strictjson.dumps(state).encode()
    for command in found:
        if len(data) <= _MAX_STATE_BYTES:
            _run(command, data)


def _run(command: Command, state: bytes) -> None:
    """Run *command* with *state* on its standard input, and wait for it."""
    try:
        read, write = os.pipe()
    except OSError:
        return
    try:
        os.write(write, state)
        pid = slowpath.spawn(command.path, command.arguments, {}, read)
    except OSError:
        return
    finally:
        os.close(read)
        os.close(write)
    if not _has_ended(pid, command.timeout_s):
        os.kill(pid, _signal.SIGKILL)
        _has_ended(pid, _GRACE_S)
    slowpath.reap(pid, os.WNOHANG)


def _has_ended(pid: int, seconds: float) -> bool:
    """Wait *seconds* for the child *pid*; return whether it is no more."""
    end = time.monotonic() + seconds
    try:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() >= end:
                return False
            time.sleep(_STEP_S)
    except ChildProcessError:
        # An engine that ignores SIGCHLD has it reaped by the kernel.
        pass
    return True
