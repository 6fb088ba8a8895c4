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
_MAX_OUTPUT_BYTES, _MAX_WHY_CHARS = 64 << 10, 500
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


def allow(unit: str, devices: Sequence[Device], host: int, deadline_s: float) -> bool:
    """Have systemd allow *devices* in its *unit*, until that ends; raise ScopeError.

    Returns whether it was told. A unit that has no rules must not get any: then systemd would
    refuse every other device, which the low-level runtime allows itself. systemctl runs in the
    mount namespace *host*, and is ended after *deadline_s*.
    """
    end = time.monotonic() + deadline_s
    show = ["show", "--property=DevicePolicy", "--property=DeviceAllow", "--", unit]
    if not _has_rules(_run(show, host, end)):
        return False
    # By their numbers: systemd reads these from a path of this form, whether it exists or not.
    rules = [
        f"DeviceAllow=/dev/{_KINDS[kind]}/{major}:{minor} rw" for kind, major, minor in devices
    ]
    _run(["set-property", "--runtime", "--", unit, *rules], host, end)
    return True


def _has_rules(shown: str) -> bool:
    """Return whether a unit with these properties refuses any device."""
    lines = [line.partition("=") for line in shown.splitlines()]
    return any(
        (name == "DevicePolicy" and value != "auto") or (name == "DeviceAllow" and value)
        for name, _, value in lines
    )


def _run(words: list[str], host: int, end: float) -> str:
    """Return what systemctl prints when it is called with *words*; raise ScopeError.

    At the time *end* it is ended.
    """
    program = next((path for path in PROGRAMS if os.access(path, os.X_OK)), "")
    if not program:
        raise ScopeError(f"there is no {PROGRAMS[0]} to tell systemd")
    try:
        reader, writer = os.pipe()
        child = os.fork()
    except OSError as error:
        raise ScopeError(f"{program}: {error.strerror}") from error
    if child == 0:
        _execute([program, *words], host, writer)
    os.close(writer)
    try:
        status = _wait(child, end)
        if status is None:
            raise ScopeError(f'"{program} {words[0]}" did not answer in time')
        output = os.read(reader, _MAX_OUTPUT_BYTES).decode("utf-8", "replace")
    finally:
        os.close(reader)
    if status != 0:
        why = output[:_MAX_WHY_CHARS].strip() or f"status {status}"
        raise ScopeError(f'"{program} {words[0]}": {why}')
    return output


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

    What it prints goes to *writer*.
    """
    try:
        syscalls.die_with_parent()
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        syscalls.setns(host, syscalls.CLONE_NEWNS)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        for fd in (1, 2):
            os.dup2(writer, fd)
        syscalls.close_range(3)
        os.execve(words[0], words, ENVIRONMENT)
    except OSError as error:
        os.write(2, str(error).encode())
    finally:
        os._exit(_NOT_RUN)
