# SPDX-License-Identifier: Apache-2.0
"""Have an engine read its config again, and wait until it answers."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import time
from dataclasses import dataclass

from gpunode.install.errors import InstallError

NONE, SYSTEMD, SIGNAL = "none", "systemd", "signal"
MODES = (NONE, SYSTEMD, SIGNAL)
SOCKETS = {
    "containerd": "/run/containerd/containerd.sock",
    "crio": "/run/crio/crio.sock",
    "docker": "/run/docker.sock",
    "k0s": "/run/k0s/containerd.sock",
    "k3s": "/run/k3s/containerd/containerd.sock",
    "microk8s": "/var/snap/microk8s/common/run/containerd.sock",
    "rke2": "/run/k3s/containerd/containerd.sock",
}
# The service is another on a node of another role: the first active one is restarted.
UNITS = {
    "containerd": ("containerd",),
    "crio": ("crio",),
    "docker": ("docker",),
    "k0s": ("k0sworker", "k0scontroller"),
    "k3s": ("k3s", "k3s-agent"),
    "microk8s": ("snap.microk8s.daemon-containerd",),
    "rke2": ("rke2-server", "rke2-agent"),
}
# Engines whose daemon reads its config again by SIGHUP, or is started again by systemd after it.
_SIGNALLED = ("containerd", "docker")
_COMMAND_DEADLINE_S = 120
_STEP_S = 0.1
# Of the host: that of this process may be the image's.
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Restarter:
    """How an engine is restarted: the *mode*, and the seconds that it may take to answer again.

    *socket* is that of the engine, "" for the usual one.
    """

    mode: str
    deadline_s: float = 60.0
    socket: str = ""

    def check(self, engine: str) -> None:
        """Raise InstallError if the mode does not suit *engine*; nothing is done."""
        if self.mode == SIGNAL and engine not in _SIGNALLED:
            raise InstallError(
                f"{engine} does not read its config again after a signal",
                "use --restart-mode systemd or none",
            )

    def restart(self, engine: str) -> None:
        """Restart *engine*, and return when it answers; raise InstallError."""
        if engine not in SOCKETS:
            # podman has no daemon: the next container has the new config.
            return
        if self.mode == SYSTEMD:
            _by_systemd(engine)
        else:
            _by_signal(self.socket or SOCKETS[engine])
        self._wait(engine)

    def _wait(self, engine: str) -> None:
        path = self.socket or SOCKETS[engine]
        end = time.monotonic() + self.deadline_s
        while not _answers(path):
            if time.monotonic() > end:
                raise InstallError(
                    f'{engine} does not answer at "{path}" within {self.deadline_s:g} s',
                    "see the log of the engine on the host; the next call tries it again",
                )
            time.sleep(_STEP_S)


def _by_systemd(engine: str) -> None:
    units = UNITS[engine]
    unit = next((unit for unit in units if not _systemctl("is-active", unit).returncode), units[0])
    process = _systemctl("restart", unit)
    if process.returncode != 0:
        lines = process.stderr.decode(errors="replace").splitlines() or [""]
        raise InstallError(
            f'"systemctl restart {unit}" failed with status {process.returncode}: {lines[0]}',
            f'see "journalctl -u {unit}" on the host; the next call tries it again',
        )


def _systemctl(verb: str, unit: str) -> subprocess.CompletedProcess[bytes]:
    """Return the process of systemctl; raise InstallError if it cannot be run."""
    words = ["systemctl", verb, unit]
    try:
        # Pipes: below the mount of a host's root there may be no /dev/null.
        return subprocess.run(
            words,
            input=b"",
            capture_output=True,
            check=False,
            timeout=_COMMAND_DEADLINE_S,
            # In a pod systemctl would take the host's root for a chroot, and do nothing.
            env={"PATH": _PATH, "SYSTEMD_IGNORE_CHROOT": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(
            f'cannot run "{" ".join(words)}" on the host: {error}',
            "mount the host's root with its /run, or use --restart-mode none",
        ) from error


def _by_signal(path: str) -> None:
    """Send SIGHUP to the process that listens at *path*; raise InstallError."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(path)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError as error:
        raise InstallError(
            f'no engine answers at "{path}": {error.strerror or error}',
            "start it, or use --restart-mode none",
        ) from error
    pid = struct.unpack("iii", credentials)[0]
    if pid <= 0:
        raise InstallError(
            f'the process behind "{path}" cannot be seen from here',
            "set hostPID: true in the pod, or use --restart-mode systemd",
        )
    try:
        os.kill(pid, signal.SIGHUP)
    except OSError as error:
        raise InstallError(
            f"cannot send SIGHUP to process {pid}: {error.strerror}", "run as root"
        ) from error


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1)
        try:
            connection.connect(path)
        except OSError:
            return False
    return True
