# SPDX-License-Identifier: Apache-2.0
"""Entry of the hook role: root on the host, in front of a file system that an attacker wrote.

Nothing is trusted: no environment variable is read, descriptors but 0, 1 and 2 are closed, the
root comes from bundle and config.json, and no path below it is used as a string. The shim, which
must be transparent, shares none of this.
"""

from __future__ import annotations

import os
import signal
import sys

from gpuruntime.errors import GpuRuntimeError, MountError, bug, escape
from gpuruntime.system import syscalls
from hooks import state, update_container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from hooks import classic

# The incumbent's hooks that a spec may name one by one.
CLASSIC = ("create-symlinks", "update-ldcache", "disable-device-node-modification")
DEADLINE_S = 10
# When the child that could not even say so is left.
LAST_DEADLINE_S = DEADLINE_S + 1
MAX_REPORT_BYTES = 64 << 10


def main() -> None:
    """Run the hook that `sys.argv` (['-c', argv[0], arguments…]) names; never returns.

    The work is done in a child. A file system of the container that does not answer, served by
    FUSE for example, holds whoever asks it, and no signal ends that: then the child is left.
    """
    # First of all: a container that shares our pid namespace must not look into this process.
    syscalls.set_undumpable()
    syscalls.close_range(3)
    program = os.path.basename(sys.argv[1])
    # The runtime waits for whoever holds its pipes: the child has only one of ours.
    report, stderr = os.pipe()
    child = os.fork()
    if child == 0:
        syscalls.die_with_parent()
        os.dup2(stderr, 2)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
        syscalls.close_range(3)
        os._exit(work(program))
    os.close(stderr)
    sys.exit(attend(child, report, program))


def work(program: str) -> int:
    """Do what the command line asks for, within the deadline; return the exit status."""
    try:
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(DEADLINE_S)
        run(sys.argv[2:], program)
    except GpuRuntimeError as error:
        _say(f"{program}: {error.lines()}")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 (a bug is one line for the engine, no traceback)
        _say(f"{program}: {bug(error).lines()}")
        return 1
    return 0


def attend(child: int, report: int, program: str) -> int:
    """Relay what *child* says on *report*; return its status, or 1 if it does not end in time."""
    text = b""
    try:
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(LAST_DEADLINE_S)
        while len(text) < MAX_REPORT_BYTES:
            chunk = os.read(report, MAX_REPORT_BYTES)
            if not chunk:
                break
            text += chunk
        _, status = os.waitpid(child, 0)
    except MountError as error:
        os.kill(child, signal.SIGKILL)
        _say(f"{program}: {error.lines()}")
        return 1
    finally:
        signal.alarm(0)
    _say(text.decode("ascii", "backslashreplace").rstrip("\n"))
    if os.WIFSIGNALED(status):
        _say(f"{program}: mount: the work was ended by signal {os.WTERMSIG(status)}")
        return 1
    return os.WEXITSTATUS(status)


def run(arguments: list[str], program: str) -> None:
    """Plan and execute the hook named by the first of *arguments*; raise GpuRuntimeError."""
    name = arguments[0] if arguments else ""
    operations: Sequence[classic.Operation]
    if name == update_container.NAME:
        operations = update_container.plan(arguments[1:])
    elif name in CLASSIC:
        from hooks import classic  # noqa: PLC0415 (our own specs never need it)

        operations = classic.plan(name, arguments[1:])
    else:
        # A spec written by a newer version must not keep containers from starting.
        _say(f'{program}: warning: there is no hook "{escape(name)}", nothing is done')
        return
    root = state.open_root(state.read_bundle(0))
    for operation in operations:
        operation.execute(root, lambda text: _say(f"{program}: warning: {escape(text)}"))


def _give_up(number: int, frame: FrameType | None) -> None:
    """Unwind, so that nothing half-made is left."""
    del number, frame
    raise MountError(
        f"the work in the container's root was not done in {DEADLINE_S} s",
        "look for a file system of the container that does not answer",
    )


def _say(text: str) -> None:
    """Write *text*, if there is any, to stderr, which the low-level runtime relays."""
    if not text:
        return
    try:
        os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
    except OSError:
        # What there is to say does not decide whether the container starts.
        pass
