# SPDX-License-Identifier: Apache-2.0
"""Entry of the hook role: root on the host, in front of a file system that an attacker wrote.

Nothing is trusted: no environment variable is read, descriptors but 0, 1 and 2 are closed, the
root comes from bundle and config.json, and no path below it is used as a string. The shim, which
must be transparent, shares none of this.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time

from gpuruntime.errors import GpuRuntimeError, MountError, bug, escape
from gpuruntime.system import syscalls
from hooks import state, update_container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

DEADLINE_S = 10
# For work that a caught signal does not interrupt, such as a request to a FUSE server.
LAST_DEADLINE_S = DEADLINE_S + 1


def main() -> None:
    """Run the hook that `sys.argv` (['-c', argv[0], arguments…]) names; never returns."""
    # First of all: a container that shares our pid namespace must not look into this process.
    syscalls.set_undumpable()
    syscalls.close_range(3)
    program = os.path.basename(sys.argv[1])
    try:
        # The runtime's own timeout does not end the wait for us.
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(DEADLINE_S)
        _thread.start_new_thread(_end_at_last, (program,))
        run(sys.argv[2:], program)
    except GpuRuntimeError as error:
        _say(f"{program}: {error.lines()}")
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 (a bug is one line for the engine, no traceback)
        _say(f"{program}: {bug(error).lines()}")
        sys.exit(1)
    sys.exit(0)


def run(arguments: list[str], program: str) -> None:
    """Plan and execute the hook named by the first of *arguments*; raise GpuRuntimeError."""
    name = arguments[0] if arguments else ""
    if name != update_container.NAME:
        # A spec written by a newer version must not keep containers from starting.
        _say(f'{program}: warning: there is no hook "{escape(name)}", nothing is done')
        return
    operations = update_container.plan(arguments[1:])
    root = state.open_root(state.read_bundle(0))
    for operation in operations:
        operation.execute(root, lambda text: _say(f"{program}: warning: {escape(text)}"))


def _too_late() -> MountError:
    return MountError(
        f"the work in the container's root was not done in {DEADLINE_S} s",
        "look for a file system of the container that does not answer",
    )


def _give_up(number: int, frame: FrameType | None) -> None:
    """Unwind, so that nothing half-made is left."""
    del number, frame
    raise _too_late()


def _end_at_last(program: str) -> None:
    """End the process, whatever the other thread is stuck in."""
    time.sleep(LAST_DEADLINE_S)
    _say(f"{program}: {_too_late().lines()}")
    os._exit(1)


def _say(text: str) -> None:
    """Write *text* to stderr, which the low-level runtime relays, if anybody reads it."""
    try:
        os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
    except OSError:
        # What there is to say does not decide whether the container starts.
        pass
