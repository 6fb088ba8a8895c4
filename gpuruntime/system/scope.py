# SPDX-License-Identifier: Apache-2.0
"""Tell systemd which devices a scope of its may use, so that it does not take them away.

On the start path, for the prestart hook alone. systemd sets the device rules of its units again
whenever it likes, at a daemon-reload for example, from its own list: systemd.resource-control(5),
DeviceAllow.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import os
import posixpath
import time

from gpuruntime.system import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

    from gpuruntime.system.device_program import Device

PROGRAMS = ("/usr/bin/systemctl", "/bin/systemctl")
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
# As long as systemd is PID 1: sd_booted(3).
_BOOTED = "/run/systemd/system"
_SUFFIX = ".scope"
# What crun makes below the scope of a container.
_BELOW = "container"
_MAX_WHY_BYTES = 500
_POLL_S = 0.002
# How long systemd may take, after its answer, to attach its program once more.
_SETTLED_S = 0.5
_NOT_RUN = 126
_KINDS = {"c": "char", "b": "block"}


class ScopeError(Exception):
    """systemd does not take the devices, or does not answer."""


def path_of(cgroup: str) -> str:
    """Return the path of the scope that *cgroup*, a path, belongs to; "" if there is none."""
    if posixpath.basename(cgroup) == _BELOW:
        cgroup = posixpath.dirname(cgroup)
    return cgroup if cgroup.endswith(_SUFFIX) and os.path.isdir(_BOOTED) else ""


def allow(unit: str, devices: Sequence[Device], host: int, deadline_s: float) -> None:
    """Have systemd allow *devices* in its *unit*, until that ends; raise ScopeError.

    systemctl runs in the mount namespace *host*, and is ended after *deadline_s*.
    """
    program = next((path for path in PROGRAMS if os.access(path, os.X_OK)), "")
    if not program:
        raise ScopeError(f"there is no {PROGRAMS[0]} to tell systemd")
    # By their numbers: systemd reads these from a path of this form, whether it exists or not.
    rules = [
        f"DeviceAllow=/dev/{_KINDS[kind]}/{major}:{minor} rw" for kind, major, minor in devices
    ]
    words = [program, "set-property", "--runtime", "--", unit, *rules]
    try:
        reader, writer = os.pipe()
        child = os.fork()
    except OSError as error:
        raise ScopeError(f"{program}: {error.strerror}") from error
    if child == 0:
        _execute(words, host, writer)
    os.close(writer)
    try:
        status = _wait(child, time.monotonic() + deadline_s)
        if status is None:
            raise ScopeError(f'"{program} set-property" did not answer in {deadline_s:g} s')
        if status != 0:
            why = os.read(reader, _MAX_WHY_BYTES).decode("utf-8", "replace").strip()
            raise ScopeError(f'"{program} set-property {unit}": {why or f"status {status}"}')
    finally:
        os.close(reader)


def rounds() -> Iterator[None]:
    """Yield now and again, as long as systemd may still be about to attach its program."""
    end = time.monotonic() + _SETTLED_S
    while time.monotonic() < end:
        yield
        time.sleep(_POLL_S)


def _wait(child: int, end: float) -> int | None:
    """Return the status of *child*, None at the time *end*; nothing of it is left."""
    status = None
    try:
        while status is None and time.monotonic() < end:
            time.sleep(_POLL_S)
            pid, wait_status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                status = os.waitstatus_to_exitcode(wait_status)
    finally:
        if status is None:
            os.kill(child, _signal.SIGKILL)
            os.waitpid(child, 0)
    return status


def _execute(words: list[str], host: int, writer: int) -> NoReturn:
    """Become the program that *words* begin with, in the mount namespace *host*.

    What it says of errors goes to *writer*.
    """
    try:
        os.dup2(writer, 2)
        syscalls.die_with_parent()
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        syscalls.setns(host, syscalls.CLONE_NEWNS)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        syscalls.close_range(3)
        os.execve(words[0], words, ENVIRONMENT)
    except OSError as error:
        os.write(2, str(error).encode()[:_MAX_WHY_BYTES])
    finally:
        os._exit(_NOT_RUN)
