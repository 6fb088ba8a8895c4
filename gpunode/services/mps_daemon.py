# SPDX-License-Identifier: Apache-2.0
"""Run the MPS control daemons: one for each resource that MPS shares, with its limits.

The GPUs are in exclusive mode while their daemon runs. A daemon whose limits or GPUs have changed
is started again, and so is one that no longer answers; the others are not interrupted. Everything
is restored when the service stops, or when the config no longer shares by MPS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil  # noqa: TID251 (no start path; the tree is ours)
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunode import devices, mps, mps_control
from gpunode.config.effective import Config
from gpunode.devices import LayoutError
from gpunode.model import DriverState, Update
from gpunode.mps import Daemon
from gpunode.mps_control import SMI, MpsError
from gpunode.mps_start import SHARED
from gpunode.services.healthz import Report
from gpunode.services.observation import Watch, watcher
from gpunode.services.spec_files import roots
from gpunode.services.turns import Turns
from gpuruntime.errors import ConfigError, GpuRuntimeError

log = logging.getLogger(__name__)

_RETRY_S = 30.0
# How often daemons that run are asked whether they answer.
_CHECK_S = 30.0
_DEADLINE_S = 10.0
# A signal ends the service within five seconds.
_STOP_DEADLINE_S = 2.0
_SHM_OPTIONS = "rw,nosuid,nodev,noexec,relatime"
_SELINUX = Path("/sys/fs/selinux/enforce")


class MpsDaemon:
    """The service; *load* returns the config in force, or raises ConfigError."""

    def __init__(
        self,
        load: Callable[[], Config],
        *,
        watch: Watch = watcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.load = load
        self.config = load()
        self.watch = watch
        self.clock = clock
        self.turns = Turns()
        self.problem = ""
        self.config_problem = ""
        self._status = "the driver has not answered yet"
        # What runs, by the resource, with the config that it was started with.
        self._running: dict[str, Daemon] = {}
        self._running_config = self.config
        self._has_memory = False
        self._retry_at: float | None = None
        self._check_at: float | None = None

    async def serve(self) -> None:
        """Keep the daemons as the GPUs and the config are, until `turns` ends."""
        try:
            async with self.watch(roots(self.config)) as observed:
                async for turn in self.turns.of(observed, self._timeout):
                    if turn.is_reload:
                        self._load_again()
                    await self._take(turn.update)
                await self._stop()
        finally:
            await self._stop()

    def _timeout(self) -> float | None:
        """Return the seconds until daemons are asked or started again, None if none is due."""
        if self._status:
            # The driver's next update is a turn.
            return None
        times = [moment for moment in (self._retry_at, self._check_at) if moment is not None]
        return max(min(times) - self.clock(), 0.0) if times else None

    def _load_again(self) -> None:
        """Use the config as it is now; keep the one in force if the new one cannot be used."""
        try:
            self.config = self.load()
        except ConfigError as error:
            self.config_problem = str(error)
            log.error("the new config is not used: %s", error.lines())
            return
        self.config_problem = ""
        self._retry_at = None
        log.info("the config was read again")

    async def _take(self, update: Update) -> None:
        """Bring the daemons in line with *update* and the config."""
        status = update.status
        self._status = "" if status.state is DriverState.READY else status.reason or "no answer"
        if status.state is not DriverState.READY or update.model is None:
            return
        if self._check_at is not None and self.clock() >= self._check_at:
            await self._check()
            self._check_at = self.clock() + _CHECK_S
        if self._retry_at is not None and self.clock() < self._retry_at:
            return
        try:
            offer = devices.offer(update.model, self.config)
            await self._change(
                {daemon.name: daemon for daemon in mps.daemons(offer, update.model)}
            )
        except (LayoutError, MpsError) as error:
            if self.problem != str(error):
                log.error("%s", error.lines())
            self.problem = str(error)
            self._retry_at = self.clock() + _RETRY_S
            if isinstance(error, LayoutError):
                await self._stop()
        else:
            self.problem, self._retry_at = "", None
        self._check_at = self.clock() + _CHECK_S if self._running else None

    async def _check(self) -> None:
        """Stop the daemons that no longer answer; they are started again."""
        for daemon in list(self._running.values()):
            try:
                await mps_control.ask(
                    self._running_config, daemon.name, mps_control.QUESTION, _DEADLINE_S
                )
            except MpsError as error:
                log.warning("the MPS control daemon is started again: %s", error.lines())
                await self._stop([daemon])

    async def _change(self, daemons: Mapping[str, Daemon]) -> None:
        """Stop what is not one of *daemons*, and start those that do not run; raise MpsError."""
        if _place(self.config) != _place(self._running_config):
            await self._stop()
        outdated = [one for name, one in self._running.items() if daemons.get(name) != one]
        if outdated:
            await self._stop(outdated)
        missing = [one for name, one in daemons.items() if name not in self._running]
        self._running_config = self.config
        if not missing:
            return
        root = Path(mps_control.directory(self.config))
        try:
            await self._provide_memory(Path(mps_control.memory_directory(self.config)))
            for daemon in missing:
                # Also if it fails in between, everything is restored.
                self._running[daemon.name] = daemon
                try:
                    await self._start_one(daemon, root / daemon.name)
                except BaseException:
                    await self._stop([daemon])
                    raise
            _touch(root / ".ready")
        except OSError as error:
            raise MpsError(
                f'cannot use "{error.filename}": {error.strerror}',
                "check --mps-root and the rights of this program",
            ) from error
        finally:
            await self._free_memory()

    async def _provide_memory(self, path: Path) -> None:
        """Have *path* be what clients share: a volume of this pod, or a tmpfs; raise MpsError."""
        if path.is_relative_to(SHARED):
            raise MpsError(
                f'the MPS root "{path.parent}" is in {SHARED}: control daemons have another one',
                "set --mps-root to a directory elsewhere, /run/nvidia/mps for example",
            )
        _make(path)
        if mps_control.has_clients_memory(self.config):
            _open_to_all(path)
            self._has_memory = True
            return
        if _is_mount(path):
            return
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2048
        options = f"{_SHM_OPTIONS},size={size}k"
        command = ["mount", "-t", "tmpfs", "-o", options, "shm", str(path)]
        await mps_control.run(self.config, command, _DEADLINE_S)
        self._has_memory = True

    async def _start_one(self, daemon: Daemon, directory: Path) -> None:
        config, name = self.config, daemon.name
        if _exists(directory / ".started"):
            # Of a service that was killed.
            with contextlib.suppress(MpsError):
                await mps_control.ask(config, name, "quit", _DEADLINE_S)
        for uuid in daemon.uuids:
            await mps_control.run(
                config, [SMI, "-i", uuid, "-c", "EXCLUSIVE_PROCESS"], _DEADLINE_S
            )
        pipes = Path(mps_control.pipe_directory(config, name))
        _make(pipes, Path(mps_control.log_directory(config, name)))
        if _exists(_SELINUX):
            label = ["chcon", "-R", "-t", "container_file_t", str(pipes)]
            await mps_control.run(config, label, _DEADLINE_S)
        await mps_control.start(config, name, _DEADLINE_S)
        for command in daemon.commands():
            await mps_control.ask(config, name, command, _DEADLINE_S)
        _touch(directory / ".started")
        log.info('%s: the MPS control daemon runs; its logs are in "%s"', name, directory / "log")

    async def _stop(self, daemons: Sequence[Daemon] | None = None) -> None:
        """Stop *daemons*, None for all, and restore GPUs and files; a failure is logged."""
        daemons = list(self._running.values()) if daemons is None else daemons
        config = self._running_config
        root = Path(mps_control.directory(config))
        for daemon in daemons:
            self._running.pop(daemon.name, None)
        if daemons:
            _remove(root / ".ready")
        await asyncio.gather(*(self._stop_one(daemon, root, config) for daemon in daemons))
        await self._free_memory()

    async def _free_memory(self) -> None:
        """Unmount or empty the shared memory unless a daemon uses it."""
        if not self._has_memory or self._running:
            return
        self._has_memory = False
        path = mps_control.memory_directory(self._running_config)
        if mps_control.has_clients_memory(self._running_config):
            await asyncio.to_thread(_empty, path)
        else:
            command = ["umount", path]
            await self._attempt(mps_control.run(self._running_config, command, 1.0))

    async def _stop_one(self, daemon: Daemon, root: Path, config: Config) -> None:
        directory = root / daemon.name
        if _exists(directory / "pipe"):
            await self._attempt(mps_control.ask(config, daemon.name, "quit", _STOP_DEADLINE_S))
        resets = (
            mps_control.run(config, [SMI, "-i", uuid, "-c", "DEFAULT"], _STOP_DEADLINE_S)
            for uuid in daemon.uuids
        )
        await asyncio.gather(*map(self._attempt, resets))
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        log.info("%s: the MPS control daemon is stopped", daemon.name)

    async def _attempt(self, action: Coroutine[Any, Any, str]) -> None:
        try:
            await action
        except GpuRuntimeError as error:
            log.error("%s", error.lines())

    def report(self) -> Report:
        """Return the state of the service for probes."""
        reasons = [text for text in (self._status, self.problem) if text]
        names = list(self._running)
        return Report(tuple(reasons), {"daemons": names, "config_error": self.config_problem})


def _place(config: Config) -> tuple[str, str]:
    """Return the directories that a daemon keeps using while it runs."""
    return mps_control.directory(config), roots(config).driver


def _empty(path: str) -> None:
    """Remove what clients have left in the directory *path*, as far as that is possible."""
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


# Short work on files below the MPS root, which is in memory.
def _exists(path: Path) -> bool:
    return path.exists()


def _make(*paths: Path) -> None:
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)


def _open_to_all(path: Path) -> None:
    path.chmod(0o1777)


def _is_mount(path: Path) -> bool:
    return path.is_mount()


def _touch(path: Path) -> None:
    path.touch()


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
