# SPDX-License-Identifier: Apache-2.0
"""Cgroups of the simulated host's own: what engines make inside lies below, and goes with them.

Cgroups are the one thing that no namespace takes away. The supervisor makes one group in each
hierarchy, process 1 enters them and a cgroup namespace and mounts the hierarchies anew, so that
/sys/fs/cgroup inside starts at these groups. A small process in a session of its own removes them
when the supervisor has ended, however it ended. Should that one be killed too, the next simulated
host removes what it finds: a lock on the directory tells a living group from a dead one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TOP = Path("/sys/fs/cgroup")
SIMHOST = "simhost-"
# Of the place that a run of the tests has to itself (isolated.py).
TESTS = "gpuruntime-tests-"
# In version 2, where a host's first processes are: beside the groups of its containers.
FIRST = "init"
# How long the last processes of a group may take to die.
REMOVAL_S = 10.0


class Hierarchy(NamedTuple):
    """One mounted cgroup hierarchy; *data* are the options that mount it again."""

    point: Path
    kind: str
    data: str
    group: Path


def hierarchies(mountinfo: str, own_cgroups: str, prefix: str) -> list[Hierarchy]:
    """Return the hierarchies mounted, each with the group that the simulated host is to have.

    *mountinfo* and *own_cgroups* are the texts of /proc/self/mountinfo and /proc/self/cgroup. The
    group is called *prefix* and the number of this process.
    """
    name = f"{prefix}{os.getpid()}"
    own: dict[str, str] = {}
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    result = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split(" ")[3:5]
        if kind not in {"cgroup", "cgroup2"} or TOP not in [Path(point), *Path(point).parents]:
            continue
        words = "" if kind == "cgroup2" else _controllers(options, own)
        if words not in own:
            continue
        path = own[words]
        if kind == "cgroup2" and os.path.basename(path) == FIRST:
            path = os.path.dirname(path)
        below = Path(point) / os.path.relpath(path, root)
        data = f"none,{words}" if words.startswith("name=") else words
        result.append(Hierarchy(Path(point), kind, data, below / name))
    return result


def _controllers(options: str, own: dict[str, str]) -> str:
    """Return the controllers among mount *options* as /proc/self/cgroup spells them."""
    words = set(options.split(","))
    for controllers in own:
        if controllers and set(controllers.split(",")) <= words:
            return controllers
    return options


def make(requested: list[Hierarchy]) -> list[Hierarchy]:
    """Make the groups *requested*, each locked until this process and its children end.

    Returns those that could be made: a hierarchy that is mounted read-only stays as it is.
    """
    usable = []
    for hierarchy in requested:
        # Not the directory: that lock says that the group lives, and this may be one of ours.
        base = os.open(hierarchy.group.parent / "cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(base, fcntl.LOCK_EX)
            _sweep(hierarchy.group.parent)
            hierarchy.group.mkdir()
            fcntl.flock(_open(hierarchy.group), fcntl.LOCK_EX)
            usable.append(hierarchy)
        except OSError as error:
            if error.errno not in {errno.EROFS, errno.EACCES}:
                raise
        finally:
            os.close(base)
    return usable


def join(requested: list[Hierarchy]) -> None:
    """Move this process into the groups *requested*."""
    for hierarchy in requested:
        group = hierarchy.group
        for file in ("cpuset.cpus", "cpuset.mems"):
            # Version 1 makes them empty, and an empty one takes no process.
            if (group / file).exists():
                (group / file).write_text((group.parent / file).read_text())
        (group / "cgroup.procs").write_text("0")


def settle(requested: list[Hierarchy]) -> None:
    """Leave the top group of version 2 free of processes and have it hand down its controllers.

    To be called in the cgroup namespace, with the hierarchies mounted anew. A group with processes
    may not hand controllers down (cgroups(7), "no internal processes").
    """
    for hierarchy in requested:
        if hierarchy.kind != "cgroup2":
            continue
        first = hierarchy.point / FIRST
        first.mkdir()
        (first / "cgroup.procs").write_text("0")
        for controller in (hierarchy.point / "cgroup.controllers").read_text().split():
            (hierarchy.point / "cgroup.subtree_control").write_text(f"+{controller}")


def thaw(top: Path) -> None:
    """Thaw what is frozen in *top* and below: what is frozen does not die."""
    for directory, _, files in os.walk(top):
        for file, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            if file in files:
                # The group may be gone by now, and the top one has no state. In version 2 with
                # nsdelegate, the top one of a cgroup namespace is frozen and thawed from outside.
                with suppress(FileNotFoundError, PermissionError):
                    (Path(directory) / file).write_text(word)


def remove(group: Path) -> None:
    """Remove *group* and all groups below it; wait for their last processes, which are dying."""
    thaw(group)
    deadline = time.monotonic() + REMOVAL_S
    for directory, _, _ in os.walk(group, topdown=False):
        while True:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                break


def _sweep(base: Path) -> None:
    """Remove the groups below *base* that nobody lives to remove."""
    for entry in os.scandir(base):
        if not entry.name.startswith((SIMHOST, TESTS)) or not entry.is_dir():
            continue
        group = _open(Path(entry.path))
        try:
            fcntl.flock(group, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(Path(entry.path))
        except BlockingIOError:
            pass
        finally:
            os.close(group)


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
