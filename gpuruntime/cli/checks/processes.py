# SPDX-License-Identifier: Apache-2.0
"""The processes of a host, read from /proc as far as the caller may see them."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gpuruntime.cli.checks.examined_machine import ExaminedMachine

_STARTED_AT = 19  # field 22 of /proc/PID/stat, counted from the one after the name
_TICKS_A_SECOND = 100  # USER_HZ
_MAX_CMDLINE_BYTES = 1 << 16
_UID = re.compile(r"^Uid:\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """A process: *name* is its full name, *started* its start time in seconds since 1970.

    With *is_of_host*, it is in the mount namespace of this process.
    """

    pid: int
    name: str
    words: tuple[str, ...]
    uid: int
    started: float
    is_of_host: bool

    def options(self, *names: str) -> list[str]:
        """Return the values of each of the options *names* on its command line, in order."""
        values = []
        for index, word in enumerate(self.words):
            option, equals, value = word.partition("=")
            if option in names:
                values.append(value if equals else "".join(self.words[index + 1 : index + 2]))
        return values

    def option(self, *names: str) -> str:
        """Return the value of the last of the options *names* on its command line, "" if none."""
        return next(reversed(self.options(*names)), "")


def path_option(machine: ExaminedMachine, process: Process, *names: str) -> str:
    """Return the absolute path in one of the options *names* of *process*, "" if there is none."""
    path = process.option(*names)
    if not path or path.startswith("/"):
        return path
    directory = machine.link(f"/proc/{process.pid}/cwd") or "/"
    return posixpath.normpath(posixpath.join(directory, path))


def environment(machine: ExaminedMachine, process: Process) -> dict[str, str]:
    """Return the environment at the start of *process*, {} if it cannot be read."""
    text = machine.read(f"/proc/{process.pid}/environ") or ""
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def running(machine: ExaminedMachine, *names: str) -> list[Process]:
    """Return the processes that have one of *names*."""
    return [process for process in _all(machine) if process.name in names]


def _all(machine: ExaminedMachine) -> Iterator[Process]:
    own_namespace = machine.link("/proc/self/ns/mnt")
    boot = _boot_time(machine)
    for entry in machine.names("/proc"):
        if not entry.isdigit():
            continue
        directory = f"/proc/{entry}"
        fields = (machine.read(f"{directory}/stat") or "").rpartition(")")[2].split()
        comm = (machine.read(f"{directory}/comm") or "").strip()
        words = (machine.read(f"{directory}/cmdline", _MAX_CMDLINE_BYTES) or "").split("\0")
        if not comm or len(fields) <= _STARTED_AT or not fields[_STARTED_AT].isdigit():
            continue
        uid = _UID.search(machine.read(f"{directory}/status") or "")
        # The kernel stores 15 characters of a name; the first word may have all of it.
        name = posixpath.basename(words[0])
        yield Process(
            int(entry),
            name if name.startswith(comm) else comm,
            tuple(words),
            int(uid[1]) if uid else 0,
            boot + int(fields[_STARTED_AT]) / _TICKS_A_SECOND,
            machine.link(f"{directory}/ns/mnt") == own_namespace,
        )


def _boot_time(machine: ExaminedMachine) -> float:
    """Return the boot time of the host; for a tree, it is exact to the second."""
    if machine.is_live:
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    match = re.search(r"^btime (\d+)", machine.read("/proc/stat") or "", re.MULTILINE)
    return float(match[1]) if match else 0.0


def open_files(machine: ExaminedMachine, process: Process) -> int | None:
    """Return the number of files that *process* may open, None if unknown."""
    limits = machine.read(f"/proc/{process.pid}/limits") or ""
    match = re.search(r"^Max open files\s+(\S+)", limits, re.MULTILINE)
    if not match:
        return None
    return int(match[1]) if match[1].isdigit() else 1 << 63


def is_held(machine: ExaminedMachine, path: str) -> bool:
    """Return whether a process listens on the socket *path*."""
    names = {path, posixpath.normpath(machine.real(path) or path)}
    if path.startswith("/run/"):
        names.add(f"/var{path}")
    lines = (machine.read("/proc/net/unix") or "").splitlines()
    return any(line.split(" ")[-1] in names for line in lines)


def home_of(machine: ExaminedMachine, uid: int) -> str:
    """Return the home directory of the user *uid*, "" if unknown."""
    for line in (machine.read("/etc/passwd") or "").splitlines():
        fields = line.split(":")
        if len(fields) >= 6 and fields[2] == str(uid):
            return fields[5]
    return ""
