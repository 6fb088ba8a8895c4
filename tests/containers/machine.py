# SPDX-License-Identifier: Apache-2.0
"""The state that containers could leave behind, on the simulated host and on the machine."""

from __future__ import annotations

import os
import platform
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

Snapshot = dict[str, frozenset[str]]

SETTLE_S = 10.0
# Simulated hosts of other test runs come and go.
FOREIGN_GROUP = re.compile(r"/simhost-\d+(/|$)")


def of_host(*ignored: Path) -> Snapshot:
    """Return the state of this simulated host, without the directories *ignored*.

    Terminals come and go: the machine's other programs have theirs in the same /dev/pts.
    """
    skipped = ("/dev/pts/", *(f"{path}/" for path in ignored))
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    trees = ("/etc", "/run", "/dev", f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/bin")
    return {
        "mounts": frozenset(
            line for line in mounts if not f"{line.split()[4]}/".startswith(skipped)
        ),
        "processes": _processes(),
        "cgroups": _groups(mounts),
        "files": frozenset(entry for tree in trees for entry in _entries(tree, skipped)),
        "loader cache": frozenset({Path("/etc/ld.so.cache").read_bytes().hex()}),
        "driver": frozenset(Path("/proc/driver/nvidia/params").read_text().splitlines()),
    }


def of_machine() -> Snapshot:
    """Return the state of the machine that runs the tests."""
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    cache = os.lstat("/etc/ld.so.cache")
    return {
        "mounts": frozenset(mounts),
        "cgroups": frozenset(filter(_is_abandoned, _groups(mounts))),
        "/dev": frozenset(_entries("/dev", ("/dev/pts/", "/dev/shm/", "/dev/mqueue/"))),
        "/run": frozenset(os.listdir("/run")),
        "/etc": frozenset(os.listdir("/etc")),
        "loader cache": frozenset({f"{cache.st_ino} {cache.st_size} {cache.st_mtime_ns}"}),
    }


def differences(before: Snapshot, take: Callable[[], Snapshot], *, lost: bool = True) -> list[str]:
    """Return the differences from *before*; wait up to SETTLE_S until there are none.

    Without *lost*, return only what was added: other programs remove their own files. A process
    that has ended is not a difference.
    """
    end = time.monotonic() + SETTLE_S
    while True:
        after = take()
        lines = [
            f"{category} {sign} {item[:200]}"
            for category in before
            for sign, old, new in (("gained", before, after), ("lost", after, before))
            if sign == "gained" or (lost and category != "processes")
            for item in sorted(new[category] - old[category])
            if not (sign == "lost" and category == "mounts" and _is_in_tmp(item))
        ]
        if not lines or time.monotonic() > end:
            return lines
        time.sleep(0.1)


def _is_in_tmp(mount: str) -> bool:
    """Return whether *mount*, a line of mountinfo, is on a path below /tmp.

    A program that removes its directory there removes the mounts on it in every namespace.
    """
    return mount.split()[4].startswith("/tmp/")


def processes_in(pid_namespace: str) -> list[str]:
    """Return the processes in *pid_namespace*, the target of the link in /proc."""
    processes = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == pid_namespace:
                processes.append(name)
        except OSError:
            continue
    return processes


def groups_of(supervisor: int) -> list[Path]:
    """Return the cgroups of the simulated host whose supervisor has the PID *supervisor*."""
    name = f"simhost-{supervisor}"
    # Not by rglob, which fails if a group disappears meanwhile.
    walk = os.walk("/sys/fs/cgroup")
    return [Path(place, name) for place, names, _ in walk if name in names]


def _groups(mounts: list[str]) -> frozenset[str]:
    """Return the cgroups of the hierarchies in *mounts*, lines of /proc/self/mountinfo."""
    points = {line.split()[4] for line in mounts if " - cgroup" in line}
    return frozenset(group for point in points for group, _, _ in os.walk(point))


def _is_abandoned(group: str) -> bool:
    """Return whether *group* is without processes: other programs use their own cgroups."""
    if FOREIGN_GROUP.search(group):
        return False
    try:
        return Path(group, "cgroup.procs").read_text() == ""
    except OSError:
        return False


def _processes() -> frozenset[str]:
    processes = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit():
                processes.add(f"{name} {Path(f'/proc/{name}/comm').read_text().strip()}")
        except OSError:
            continue
    return frozenset(processes)


def _entries(tree: str, skipped: tuple[str, ...] = ()) -> list[str]:
    """Return each path below *tree* with the metadata that identifies the file."""
    entries = []
    for directory, children, names in os.walk(tree):
        children[:] = [name for name in children if f"{directory}/{name}/" not in skipped]
        for name in (*children, *names):
            path = f"{directory}/{name}"
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            entry = f"{path} {status.st_mode:o} {status.st_rdev}"
            if stat.S_ISREG(status.st_mode):
                entry += f" {status.st_ino} {status.st_size} {status.st_mtime_ns}"
            entries.append(entry)
    return entries
