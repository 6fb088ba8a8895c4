# SPDX-License-Identifier: Apache-2.0
"""Run a command in PID and cgroup namespaces of its own, of which nothing remains afterwards."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import cgroups
import namespace
from artefacts import SimhostError

FORWARDED = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
WAITED = FORWARDED | {signal.SIGCHLD}
# Enters the other namespaces, given the groups; returns changes of the command's environment.
Enter = Callable[[list[cgroups.Hierarchy]], Mapping[str, str]]
# Its words, or what is called in its process.
Command = list[str] | Callable[[], int]


def run(command: Command, enter: Enter, prefix: str) -> int:
    """Run *command* where *enter* leads process 1 of a PID namespace; return its exit status.

    Its cgroups are called *prefix* and a number. A command ended by signal N gives 128 + N, one
    that is not found 127.
    """
    # Signals wait to be taken up by the loops below; the command gets its mask back.
    mask: set[int] = set(signal.pthread_sigmask(signal.SIG_BLOCK, WAITED))
    mounted = Path("/proc/self/mountinfo").read_text()
    own = Path("/proc/self/cgroup").read_text()
    groups = cgroups.make(cgroups.hierarchies(mounted, own, prefix))
    # Reading it blocks while this process lives.
    life, held = os.pipe()
    remover = _start_remover(groups, life, held)
    namespace.unshare(namespace.CLONE_NEWPID)
    first = os.fork()
    if first == 0:
        namespace.die_with_parent(signal.SIGKILL)
        os.close(held)
        # The parent may have ended before that.
        if select.select([life], [], [], 0)[0]:
            os._exit(1)
        _first_process(command, enter, groups, mask)
    status = _wait_for(first)
    os.close(held)
    # Where it has been killed it may have been waited for already.
    with suppress(ChildProcessError):
        if os.waitpid(remover, 0)[1] != 0:
            print("simhost: could not remove all cgroups", file=sys.stderr)
    return status


def _start_remover(groups: list[cgroups.Hierarchy], life: int, held: int) -> int:
    """Start the process that removes *groups* when all copies of *held* are closed."""
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        # Who kills the supervisor's group or closes its terminal does not mean this one.
        os.setsid()
        os.close(held)
        nothing = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.closerange(3, life)
        os.closerange(life + 1, os.sysconf("SC_OPEN_MAX"))
        os.chdir("/")
        os.read(life, 1)
        for hierarchy in groups:
            cgroups.remove(hierarchy.group)
        os._exit(0)
    finally:
        os._exit(1)


def _first_process(
    command: Command, enter: Enter, groups: list[cgroups.Hierarchy], mask: set[int]
) -> NoReturn:
    """Be process 1: enter the namespaces, run *command*, end with its status."""
    try:
        changed = enter(groups)
        child = os.fork()
        if child == 0:
            _become(command, changed, mask)
        status = _wait_for(child)
        for hierarchy in groups:
            cgroups.thaw(hierarchy.point)
    except (SimhostError, OSError) as error:
        print(f"simhost: {error}", file=sys.stderr)
        status = 1
    # Not sys.exit: what the parent has buffered or registered is the parent's. The end of process
    # 1 ends all others, and is not complete before they are gone (pid_namespaces(7)).
    os._exit(status)


def _become(command: Command, changed: Mapping[str, str], mask: set[int]) -> NoReturn:
    # The interpreter ignores these two for itself.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if callable(command):
        _call(command, changed)
    try:
        os.execvpe(command[0], command, {**os.environ, **changed})
    except OSError as error:
        print(f'simhost: "{command[0]}": {error.strerror}', file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _call(command: Callable[[], int], changed: Mapping[str, str]) -> NoReturn:
    """Call *command* and end with its status."""
    status = 1
    try:
        os.environ.update(changed)
        status = command()
    except BaseException:  # noqa: BLE001 (nobody is there to catch it)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait_for(child: int) -> int:
    """Wait for *child*, passing on signals and reaping orphans, and return its exit status."""
    while True:
        info = signal.sigwaitinfo(WAITED)
        if info.si_signo != signal.SIGCHLD:
            # A terminal sends its signals to the whole group, and the command has had its own:
            # only what a process sent (si_code 0 or less) is passed on.
            if info.si_code <= 0:
                os.kill(child, info.si_signo)
            continue
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    raise AssertionError
