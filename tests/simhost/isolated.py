#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command apart from the machine: `isolated.py CMD...`.

The command has namespaces of its own: what other programs on this machine start, mount, listen on
and write does not reach it, and what it does is gone when it has ended. /run is empty, /etc is a
copy without the files of engines and of GPU software, there is no network but the loopback
interface, and what is built below the tree's build/ is not there afterwards, but for what is
SHARED. The rest of the file system is the machine's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import struct
import sys
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
# Of the machine's /etc: what its engines and its GPU software are told.
LEFT_OUT = frozenset(
    [
        *("cdi", "gpuruntime", "nvidia-container-runtime"),
        *("containerd", "crio", "docker", "k0s", "rancher"),
    ]
)
# What the machine's user has said to such programs, and where a session of theirs is.
VARIABLES = ("CONTAINERD_", "CONTAINER_", "DOCKER_", "GPURUNTIME_", "NVIDIA_", "PODMAN_")
SESSION = ("DBUS_SESSION_BUS_ADDRESS", "NOTIFY_SOCKET", "XDG_RUNTIME_DIR")
KEPT = ("GPURUNTIME_TEST_", "GPURUNTIME_WRITE_GOLDEN")

SIOCSIFFLAGS = 0x8914
IFF_UP = 1


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
    namespace.mount("proc", "/proc", "proc")
    _start_loopback()
    layers = Path("/mnt")
    namespace.mount("isolated", layers, "tmpfs", 0, "mode=755")
    namespace.copy_dev(layers / "dev")
    namespace.mount(layers / "dev", "/dev", "", namespace.MS_MOVE)
    _copy(Path("/etc"), layers / "etc", LEFT_OUT)
    namespace.bind(layers / "etc", "/etc")
    namespace.own_run()
    _own_build(layers)
    namespace.unmount(layers, namespace.MNT_DETACH)
    os.chdir(directory)
    # There is no network: what prepare.py has fetched is all that there is.
    wheels = [path.as_uri() for path in (TOP / "wheels").glob("*") if not path.suffix]
    return {MARK: "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": " ".join(wheels)}


def _start_loopback() -> None:
    """Set the loopback interface of this network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def _own_build(layers: Path) -> None:
    """Have what is written to build/ in *layers*, but for what is SHARED."""
    shared = [TOP / name for name in SHARED if (TOP / name).is_dir()]
    kept = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in shared]
    namespace.overlay(layers / "build", [TOP], TOP)
    for path, descriptor in kept:
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
