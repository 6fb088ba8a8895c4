# SPDX-License-Identifier: Apache-2.0
"""The config manager: keeps a symlink on the config that the node's label names, beside a plugin.

It sends a signal to the plugin after a change, for which both need one PID namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunode.services.config_choice import ConfigChoice, NamedConfigs
from gpunode.services.healthz import Report, probe_server
from gpunode.services.node_label import NodeLabel
from gpunode.services.service_group import ServiceGroup
from gpunode.services.turns import STOP_SIGNALS
from gpuruntime.errors import ConfigError

log = logging.getLogger(__name__)

# The kernel cuts the names of processes.
_COMM_CHARS = 15
_LABEL = "node-label"


@dataclass(frozen=True, slots=True)
class Target:
    """The process to signal after a change; *number* is the signal, None to send none."""

    process: str
    number: int | None = signal.SIGHUP
    proc: str = "/proc"


class ConfigManager:
    """The service. *values* yields the values of the label, *link* is the path of the symlink."""

    def __init__(
        self,
        values: Callable[[], AsyncIterator[str | None]],
        configs: NamedConfigs,
        link: str,
        target: Target,
        *,
        healthz: str = "",
    ) -> None:
        self.values = values
        self.choice = ConfigChoice("", configs)
        self.link = Path(link)
        self.target = target
        self.group = ServiceGroup({_LABEL: lambda: NodeLabel(values, self.take)})
        self.probes = probe_server(healthz, self.report) if healthz else None

    async def once(self) -> None:
        """Set the symlink by the label as it is now; raise ApiServerError or ConfigError."""
        value = await anext(self.values())
        self.choice.take(value)
        # Raises the error of a name that does not exist.
        self.choice.load_path()
        self._apply()

    async def run(self) -> None:
        """Follow the label until a signal."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.group.stop)
        async with self.probes or contextlib.nullcontext():
            await self.group.serve()

    def take(self, value: str | None) -> None:
        """Set the symlink by the label's *value*; raise ConfigError if it cannot be written."""
        self.choice.take(value)
        if self.choice.path:
            self._apply()

    def _apply(self) -> None:
        path = self.choice.path
        if not _point(self.link, path):
            return
        log.info('"%s" is "%s"', self.link, path)
        if self.target.number is None:
            return
        pids = processes(self.target)
        for pid in pids:
            try:
                os.kill(pid, self.target.number)
            except OSError as error:
                log.error("cannot send a signal to process %d: %s", pid, error.strerror)
        if not pids:
            log.warning('no process is called "%s": no signal is sent', self.target.process)

    def report(self) -> Report:
        """Return the state of the service for probes."""
        state = self.choice.report()
        reasons = [state["problem"]] if state["problem"] else []
        label = self.group.reports()[_LABEL]
        reasons += [reason for reason in label.reasons if reason not in reasons]
        return Report(tuple(reasons), {**label.details, "path": state["path"]})


def _point(link: Path, path: str) -> bool:
    """Make *link* a symlink to *path*; return whether it was not. Raises ConfigError."""
    try:
        if link.is_symlink() and os.readlink(link) == path:
            return False
        temporary = link.with_name(f".{link.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path)
        temporary.replace(link)
    except OSError as error:
        raise ConfigError(
            f'cannot make the symlink "{link}": {error.strerror}',
            "name a path in a directory that this program may write to",
        ) from error
    return True


def processes(target: Target) -> list[int]:
    """Return the processes that *target* names, but not this one."""
    pids = [int(entry) for entry in os.listdir(target.proc) if entry.isdecimal()]
    return [pid for pid in sorted(pids) if pid != os.getpid() and _is(pid, target)]


def _is(pid: int, target: Target) -> bool:
    directory = Path(target.proc, str(pid))
    try:
        comm = (directory / "comm").read_text("utf-8", "replace").rstrip("\n")
        line = (directory / "cmdline").read_text("utf-8", "replace")
    except OSError:
        # It has ended.
        return False
    return is_called(target.process, comm, line.split("\0")[:-1])


def is_called(name: str, comm: str, arguments: Sequence[str]) -> bool:
    """Return whether a process with *arguments*, which the kernel calls *comm*, has *name*.

    A name is that of a program, also of one that an interpreter runs, or a program and its first
    arguments, such as `gpu-node device-plugin`.
    """
    words = name.split()
    if words == [name] and comm == name[:_COMM_CHARS]:
        return True
    programs = [os.path.basename(argument) for argument in arguments[: len(words) + 1]]
    return any(programs[at : at + len(words)] == words for at in (0, 1))
