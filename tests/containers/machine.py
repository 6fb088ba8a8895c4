# SPDX-License-Identifier: Apache-2.0
"""What containers could leave behind: on the (simulated) GPU host, and on the machine itself."""

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
    """Return the state of the simulated host that this runs on, without the trees *ignored*."""
    skipped = tuple(f"{path}/" for path in ignored)
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
    """Return what differs from *before*, after some time for what ends by itself.

    Without *lost* only what is there and was not: others take away what is theirs. A process that
    has ended is no difference: it may have been about to.
    """
    end = time.monotonic() + SETTLE_S
    while True:
        after = take()
        found = [
            f"{what} {sign} {item[:200]}"
            for what in before
            for sign, gone, here in (("gained", before, after), ("lost", after, before))
            if sign == "gained" or (lost and what != "processes")
            for item in sorted(here[what] - gone[what])
            if not (sign == "lost" and what == "mounts" and _is_in_tmp(item))
        ]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _is_in_tmp(mount: str) -> bool:
    """Return whether *mount*, a line of mountinfo, is on a path below /tmp.

    Whoever removes such a directory of theirs takes the mounts on it out of every namespace.
    """
    return mount.split()[4].startswith("/tmp/")


def processes_in(pid_namespace: str) -> list[str]:
    """Return the processes whose PID namespace is *pid_namespace*, as its link in /proc reads."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == pid_namespace:
                found.append(name)
        except OSError:
            continue
    return found


def groups_of(supervisor: int) -> list[Path]:
    """Return the cgroups of the simulated host whose supervisor had that process number."""
    return list(Path("/sys/fs/cgroup").rglob(f"simhost-{supervisor}"))


def _groups(mounts: list[str]) -> frozenset[str]:
    """Return the cgroups of the hierarchies in *mounts*, lines of /proc/self/mountinfo."""
    points = {line.split()[4] for line in mounts if " - cgroup" in line}
    return frozenset(group for point in points for group, _, _ in os.walk(point))


def _is_abandoned(group: str) -> bool:
    """Return whether *group* is nobody's: other programs on the machine have theirs in use."""
    if FOREIGN_GROUP.search(group):
        return False
    try:
        return Path(group, "cgroup.procs").read_text() == ""
    except OSError:
        return False


def _processes() -> frozenset[str]:
    found = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit():
                found.add(f"{name} {Path(f'/proc/{name}/comm').read_text().strip()}")
        except OSError:
            continue
    return frozenset(found)


def _entries(tree: str, skipped: tuple[str, ...] = ()) -> list[str]:
    """Return each name below *tree* with what tells that it is still the same file."""
    found = []
    for directory, children, names in os.walk(tree):
        children[:] = [name for name in children if f"{directory}/{name}/" not in skipped]
        for name in (*children, *names):
            path = f"{directory}/{name}"
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            kept = f"{path} {status.st_mode:o} {status.st_rdev}"
            if stat.S_ISREG(status.st_mode):
                kept += f" {status.st_ino} {status.st_size} {status.st_mtime_ns}"
            found.append(kept)
    return found
