# SPDX-License-Identifier: Apache-2.0
"""Run each check in a process of its own, so that it cannot break or delay the others."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from gpuruntime.cli.checks.finding import FAIL, Finding, Note, combine
from gpuruntime.cli.checks.machine import Machine
from gpuruntime.errors import GpuRuntimeError, bug

Check = Callable[[Machine], Iterable[Note]]
_TRIES, _STEP_S = 100, 0.01
_CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class _Child:
    name: str
    pid: int
    fd: int
    answer: bytes = b""


def run(checks: Mapping[str, Check], machine: Machine, deadline_s: float) -> list[Finding]:
    """Return what *checks* find on *machine*, in their order; each has *deadline_s* in all.

    A check that raises, dies or hangs is a failure of its own name. To be called where there is
    one thread.
    """
    # Ignored, it would have the kernel wait for our children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children = [_start(name, check, machine) for name, check in checks.items()]
    end = time.monotonic() + deadline_s
    waiting = {child.fd: child for child in children}
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    late = set()
    while waiting:
        ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
        if not ready:
            late = {child.name for child in waiting.values()}
            break
        for fd, _ in ready:
            chunk = os.read(fd, _CHUNK_BYTES)
            waiting[fd].answer += chunk
            if not chunk:
                del waiting[fd]
                poll.unregister(fd)
    return [_end(child, is_late=child.name in late, deadline_s=deadline_s) for child in children]


def _start(name: str, check: Check, machine: Machine) -> _Child:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _answer(name, check, machine, write_fd)
    os.close(write_fd)
    return _Child(name, pid, read_fd)


def _answer(name: str, check: Check, machine: Machine, fd: int) -> NoReturn:
    """Be the child: write the finding, and leave without what the parent has to do at its end."""
    try:
        # What the check starts is in this group, and ends with it.
        os.setsid()
        found = _found(name, check, machine)
        data = json.dumps([found.status, found.what, found.action]).encode()
        while data:
            data = data[os.write(fd, data) :]
    finally:
        # Also where the check asks to exit.
        os._exit(0)


def _found(name: str, check: Check, machine: Machine) -> Finding:
    try:
        return combine(name, check(machine)).without(machine.root)
    except GpuRuntimeError as error:
        return Finding(name, FAIL, error.message, error.hint or "").without(machine.root)
    except Exception as error:  # noqa: BLE001 (of one check: the others go on)
        return Finding(name, FAIL, bug(error).message, "report it with this line")


def _end(child: _Child, *, is_late: bool, deadline_s: float) -> Finding:
    """Return the finding of *child*, which is not there any more then, nor what it has started."""
    os.close(child.fd)
    _kill(child.pid)
    if is_late:
        # What the kernel holds cannot be waited for.
        for _ in range(_TRIES):
            if os.waitpid(child.pid, os.WNOHANG)[0]:
                break
            time.sleep(_STEP_S)
        return Finding(
            child.name,
            FAIL,
            f"no answer in {deadline_s:g} s: something of the host hangs",
            'look for hung tasks, NVRM and Xid lines in "dmesg"',
        )
    os.waitpid(child.pid, 0)
    try:
        status, what, action = json.loads(child.answer)
    except ValueError:
        return Finding(child.name, FAIL, "the check has died", "report it, with this line")
    return Finding(child.name, status, what, action)


def _kill(pid: int) -> None:
    """End the child *pid*, which nobody has waited for yet, and its group."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has no group of its own yet.
            continue
