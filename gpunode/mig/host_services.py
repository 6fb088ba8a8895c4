# SPDX-License-Identifier: Apache-2.0
"""The services of the host that use GPUs: systemd stops and starts them around a change of MIG."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpunode.config import file
from gpunode.mig import commands

_SCHEMA = os.path.join(os.path.dirname(os.path.dirname(__file__)), "mig_clients_schema.json")
# It would start pods again; only a change of a MIG mode needs that nothing uses a GPU.
_ONLY_FOR_MODES = "kubelet.service"


class HostServices:
    """The services of the file *path*, of the host whose root is mounted at *host_root*."""

    def __init__(self, path: str, host_root: str) -> None:
        """Read the file; raise ConfigError."""
        self._names: list[str] = list(file.read(path, _SCHEMA).get(("systemd-services",)))
        self._prefix = [] if host_root == "/" else ["chroot", host_root]

    def running(self, *, changes_mode: bool) -> tuple[str, ...]:
        """Return the services that run, and have to stop for a change; raise CommandError."""
        names = [name for name in self._names if changes_mode or name != _ONLY_FOR_MODES]
        if not names:
            return ()
        options = ("list-units", "--state=active", "--plain", "--no-legend", "--no-pager", "--")
        lines = self._systemctl("the list of host services", *options, *names).splitlines()
        active = {line.split()[0] for line in lines if line.strip()}
        return tuple(name for name in names if _unit(name) in active)

    def stop(self, names: Sequence[str]) -> None:
        """Stop services; raise CommandError."""
        self._systemctl("the stop of host services", "stop", "--", *names)

    def start(self, names: Sequence[str]) -> None:
        """Start services; raise CommandError."""
        self._systemctl("the start of host services", "start", "--", *names)

    def _systemctl(self, subject: str, *arguments: str) -> str:
        return commands.run(subject, [*self._prefix, "systemctl", *arguments])


def _unit(name: str) -> str:
    return name if "." in name else f"{name}.service"
