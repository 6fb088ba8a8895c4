#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command apart from the machine: `isolated.py CMD...`.

The command has namespaces of its own: what other programs on this machine start, mount, listen on
and write does not reach it, and what it does is gone when it has ended.

/run is empty. /etc is a copy without the configuration of engines and GPU software, and /var one
without the state of kubelets. /tmp has only
what belongs to the tree and to pytest. What is written to /var and to the tree's build/ is gone
afterwards, except in the SHARED parts of build/. /usr cannot be written.
There is no network but the loopback interface.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import socket
import stat
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import cgroups
import namespace
import supervisor
from artefacts import BUILD, SimhostError

# In the environment of the command.
MARK = "GPURUNTIME_TEST_ISOLATED"
TOP = BUILD.parent
# Parts of build/ that are the same for whoever uses the tree; the others are of one run.
SHARED = ("cache", "driver-root", "newer-engines", "simhost", "test-install", "watched", "wheels")
# The configuration of engines and GPU software in the machine's /etc.
LEFT_OUT = frozenset(
    [
        *("cdi", "gpuruntime", "nvidia-container-runtime"),
        *("containerd", "crio", "docker", "k0s", "rancher"),
    ]
)
# Variables that configure such programs, and those that lead to a session of the user.
VARIABLES = ("CONTAINERD_", "CONTAINER_", "DOCKER_", "GPURUNTIME_", "NVIDIA_", "PODMAN_")
SESSION = ("DBUS_SESSION_BUS_ADDRESS", "NOTIFY_SOCKET", "XDG_RUNTIME_DIR")
KEPT = ("GPURUNTIME_TEST_", "GPURUNTIME_WRITE_GOLDEN")

# What an installation of this project and the machine's kubelets keep.
STATES = [
    Path("/var") / name
    for name in ("lib/gpuruntime", "lib/k0s", "lib/kubelet", "lib/rancher", "snap/microk8s")
]

SIOCSIFFLAGS = 0x8914
IFF_UP = 1
MS_RDONLY = 1
MS_REMOUNT = 32
READ_ONLY = namespace.MS_BIND | MS_REMOUNT | MS_RDONLY


def may() -> bool:
    """Return whether this process may make namespaces: it is root, with CAP_SYS_ADMIN."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return os.geteuid() == 0 and bool(int(effective.split()[1], 16) >> 21 & 1)


def enter(groups: list[cgroups.Hierarchy]) -> dict[str, str]:
    """Enter the namespaces, as process 1; return changes of the command's environment."""
    directory = os.getcwd()
    cgroups.join(groups)
    namespace.unshare(
        namespace.CLONE_NEWNS
        | namespace.CLONE_NEWCGROUP
        | namespace.CLONE_NEWIPC
        | namespace.CLONE_NEWNET
    )
    namespace.mount("none", "/", "", namespace.MS_REC | namespace.MS_PRIVATE)
    namespace.mount_cgroups(groups)
    # In place of the machine's, not on it: who takes it away is to find none.
    while os.path.ismount("/proc"):
        namespace.unmount("/proc", namespace.MNT_DETACH)
    namespace.mount("proc", "/proc", "proc")
    _start_loopback()
    layers = Path("/mnt")
    namespace.mount("isolated", layers, "tmpfs", 0, "mode=755")
    namespace.copy_dev(layers / "dev")
    namespace.mount(layers / "dev", "/dev", "", namespace.MS_MOVE)
    _copy(Path("/etc"), layers / "etc", LEFT_OUT)
    namespace.bind(layers / "etc", "/etc")
    namespace.own_run()
    namespace.overlay(layers / "var", [Path("/var")], Path("/var"))
    for state in STATES:
        _hide(state)
    namespace.bind("/usr", "/usr")
    namespace.mount("", "/usr", "", READ_ONLY)
    _own_tmp()
    _own_build(layers)
    namespace.unmount(layers, namespace.MNT_DETACH)
    os.chdir(directory)
    # There is no network: what prepare.py has fetched is all that there is.
    wheels = [path.as_uri() for path in (TOP / "wheels").glob("*") if not path.suffix]
    return {MARK: "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": " ".join(wheels)}


def _start_loopback() -> None:
    """Set the loopback interface of this network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def _hide(directory: Path) -> None:
    """Remove *directory* from this namespace's copy of /var, if all of it is part of that.

    What is mounted on it or below it is no copy: it is unmounted first.
    """
    copy = os.stat("/var").st_dev
    below = namespace.mounts_below(directory.parent)
    points = [point for point in below if directory in (point, *point.parents)]
    for point in points:
        # Several may be at one place; those under the copy are listed, and cannot be reached.
        with suppress(SimhostError):
            while True:
                namespace.unmount(point, namespace.MNT_DETACH)
    places = () if directory.is_symlink() else (directory, *points)
    if any(place.is_dir() and place.stat().st_dev != copy for place in places):
        return
    if directory.is_symlink() and directory.parent.stat().st_dev == copy:
        directory.unlink()
    elif directory.is_dir():
        shutil.rmtree(directory)


def _own_tmp() -> None:
    """Have a /tmp with those of its directories that the tree, its Python or pytest are in.

    And those that the command line names.
    """
    tmp = Path("/tmp")
    reports = Path(tempfile.gettempdir(), f"pytest-of-{getpass.getuser()}")
    reports.mkdir(mode=0o700, exist_ok=True)
    words = [word.rpartition("=")[2] for word in sys.argv]
    used = {reports, Path.cwd(), BUILD}
    used |= {Path(path) for path in (sys.prefix, sys.base_prefix, *sys.path, *words)}
    # A copy of a tree has links to what it shares with that (mutants/tree.py).
    linked = [
        path for top in (TOP, *sys.path) if os.path.isdir(top) for path in Path(top).iterdir()
    ]
    real = {path.resolve() for path in (*used, *linked)}
    names = {path.relative_to(tmp).parts[0] for path in used | real if tmp in path.parents}
    directories = sorted(name for name in names if (tmp / name).is_dir())
    opened = {name: os.open(tmp / name, os.O_PATH | os.O_CLOEXEC) for name in directories}
    namespace.mount("tmp", tmp, "tmpfs", 0, "mode=1777")
    for name, descriptor in opened.items():
        (tmp / name).mkdir()
        namespace.bind(f"/proc/self/fd/{descriptor}", tmp / name)
        os.close(descriptor)


def _own_build(layers: Path) -> None:
    """Have what is written to build/ in *layers*, but for what is SHARED."""
    shared = [TOP / name for name in SHARED if (TOP / name).is_dir()]
    opened = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in shared]
    namespace.overlay(layers / "build", [TOP], TOP)
    for path, descriptor in opened:
        # A link leads out of the overlay by itself.
        if not path.is_symlink():
            namespace.bind(f"/proc/self/fd/{descriptor}", path)
        os.close(descriptor)


def _copy(source: Path, target: Path, left_out: frozenset[str] = frozenset()) -> None:
    """Copy the directory *source* to *target*, which is not there, without the names *left_out*.

    What goes away meanwhile is left out too, and what is neither file, directory nor link.
    """
    target.mkdir()
    for entry in os.scandir(source):
        if entry.name in left_out:
            continue
        copy = target / entry.name
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                copy.symlink_to(os.readlink(entry.path))
            elif stat.S_ISDIR(status.st_mode):
                _copy(Path(entry.path), copy)
            elif stat.S_ISREG(status.st_mode):
                shutil.copyfile(entry.path, copy)
            else:
                continue
            os.chown(copy, status.st_uid, status.st_gid, follow_symlinks=False)
    shutil.copystat(source, target)


def main() -> int:
    """Run the command line and return the exit status of the command."""
    if not may():
        print("isolated: this needs root, with CAP_SYS_ADMIN", file=sys.stderr)
        return 1
    for name in [*os.environ]:
        if name in SESSION or (name.startswith(VARIABLES) and not name.startswith(KEPT)):
            del os.environ[name]
    try:
        return supervisor.run(sys.argv[1:], enter, cgroups.TESTS)
    except SimhostError as error:
        print(f"isolated: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
