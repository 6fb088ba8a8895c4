# SPDX-License-Identifier: Apache-2.0
"""Change the GPUs to the config that a label of the node names; publish the result in another.

All of this runs in one thread of its own, which may block. Operands are paused while GPUs change,
and restored in the same request that says how it ended. That request is repeated until the API
server accepts it; what it has to restore is in a file.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from gpunode import mig_config
from gpunode.api.errors import CONFLICT, FORBIDDEN, ApiServerError
from gpunode.mig import change, commands, engine, journal, operands, states
from gpunode.mig.commands import CommandError
from gpunode.mig.engine import InUseError, RebootNeededError
from gpunode.mig.host import Host
from gpunode.mig.host_services import HostServices
from gpunode.mig.journal import LockedError
from gpunode.mig.node import CONFIG_LABEL, Node, NodeView
from gpunode.mig.operands import Pause
from gpunode.mig.states import Target
from gpunode.mig_config import MigConfig
from gpuruntime.errors import (
    ArgumentError,
    ConfigError,
    DriverError,
    GpuRuntimeError,
    bug,
    escape,
)

log = logging.getLogger(__name__)

STATE_LABEL = "nvidia.com/mig.config.state"
# The node is read at least this often, should the watch not report a change.
_POLL_S = 60.0
_RETRY_S = 5.0
# After this time, a driver that did not answer and a lock that was held are tried again.
_BLOCKED_RETRY_S = 30.0
_POD_POLL_S = 2.0


class State(enum.Enum):
    """The values of the state label."""

    PENDING = "pending"
    REBOOTING = "rebooting"
    SUCCESS = "success"
    FAILED = "failed"


class StoppedError(GpuRuntimeError):
    """The service ends before the work is done."""


class PodsError(GpuRuntimeError):
    """The pods of paused operands did not end."""

    phase = "operands"


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of the manager.

    *operands* has the label `app` of the pods of each operand. *services* are stopped for a
    change, and started again. *reboot* is called where a mode needs it, None to fail instead.
    Within *hold*, no process of ours calls NVML. *refresh* is called after a change. *boot_id*
    differs between boots.
    """

    config_file: str
    pause_file: str
    hooks_file: str = ""
    operands: Mapping[str, str] = field(default_factory=lambda: operands.OPERANDS)
    services: HostServices | None = None
    pods_timeout_s: float = 300.0
    reboot: Callable[[], None] | None = None
    hold: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    refresh: Callable[[], None] = lambda: None
    boot_id: str = ""


class Manager:
    """The manager of *node* and *host*, until *stop* is set. *wake* says that the node changed."""

    def __init__(
        self,
        node: Node,
        host: Host,
        options: Options,
        stop: threading.Event,
        wake: threading.Event,
    ) -> None:
        self._node = node
        self._host = host
        self._options = options
        self._stop = stop
        self._wake = wake
        # The config that the label had at the last look, None before the first.
        self._config_name: str | None = None
        self._is_done = False
        # An operand may be paused by a manager whose file is lost, or by the incumbent's.
        self._may_be_paused = True
        # Whether the change at work may have paused an operand.
        self._has_paused = False
        self.state: State | None = None
        self.problem = ""

    @property
    def config_name(self) -> str:
        """The config that the label names, "" without one."""
        return self._config_name or ""

    @property
    def obstacle(self) -> str:
        """Why the manager cannot do what the label says at present, "" if it has done its work."""
        return "" if self._is_done else self.problem

    def run(self) -> None:
        """Follow the label until the service stops."""
        while True:
            self._wake.clear()
            if self._stop.is_set():
                return
            pause_s = _POLL_S
            try:
                self._follow()
                if not self._is_done and self._config_name:
                    pause_s = _BLOCKED_RETRY_S
            except StoppedError:
                return
            except GpuRuntimeError as error:
                self._note(error)
                pause_s = _RETRY_S
            self._wake.wait(pause_s)

    def reload(self) -> None:
        """Have the config applied again, though the label is the same."""
        self._config_name = None
        self._wake.set()

    def _follow(self) -> None:
        """Do what the label says if that is new, or what was begun and not ended."""
        view = self._node.read()
        is_paused = os.path.exists(self._options.pause_file)
        if self._may_be_paused and not is_paused:
            is_paused = bool(operands.restored(view.labels, self._options.operands, {}))
        name = view.labels.get(CONFIG_LABEL, "")
        if name == self._config_name and self._is_done and not is_paused:
            return
        is_new = self._config_name not in (None, name)
        if not name:
            self._recover_only(is_paused=is_paused)
            self._config_name, self._is_done = name, True
            return
        self._config_name, self._is_done = name, False
        if is_new:
            self._publish(State.PENDING)
        self._reconfigure(name, is_paused=is_paused)

    def _recover_only(self, *, is_paused: bool) -> None:
        """End what was begun before the label was removed."""
        self.problem = ""
        with journal.lock(self._host.state_directory):
            try:
                if self._has_journal():
                    change.recover(self._host, log.warning)
            finally:
                if is_paused:
                    self._publish(None, restores=True)
        self.state = None

    def _has_journal(self) -> bool:
        return bool(journal.load(f"{self._host.state_directory}/journal.json"))

    def _reconfigure(self, name: str, *, is_paused: bool) -> None:
        """Apply the config *name*, and publish how that ended."""
        self._has_paused = False
        try:
            with journal.lock(self._host.state_directory):
                is_changed = self._change(name, is_paused=is_paused)
        except StoppedError:
            self._fail(StoppedError("the manager of MIG was stopped before the change"))
            raise
        except GpuRuntimeError as error:
            # Before an operand was paused, another attempt disturbs nobody.
            is_passing = not self._has_paused and (
                isinstance(error, DriverError | LockedError)
                or (isinstance(error, ApiServerError) and error.status != FORBIDDEN)
            )
            # What the other manager has paused is its own to restore.
            self._fail(error, restores=not isinstance(error, LockedError), is_final=not is_passing)
            self._is_done = not is_passing
            return
        except Exception as error:
            self._fail(bug(error))
            raise
        if self.state is State.REBOOTING:
            self._stop.wait()
            raise StoppedError("the node reboots")
        self.problem = ""
        self._publish(State.SUCCESS, restores=True)
        self._is_done = True
        if is_changed:
            self._report("MigConfigApplied", f"the GPUs have the MIG config {name}")

    def _change(self, name: str, *, is_paused: bool) -> bool:
        """Change the GPUs to the config *name*; return whether they changed.

        Raises GpuRuntimeError; operands may then be paused.
        """
        if self._has_journal():
            change.recover(self._host, log.warning)
        config = _select(self._options.config_file, name)
        hooks = self._hooks(name)
        changes_mode = self._changes_mode(config)
        if changes_mode is None:
            return False
        pause = self._pause_operands(self._load_pause() if is_paused else Pause())
        pause = self._stop_services(pause, changes_mode=changes_mode)
        # The driver changes a mode only if nothing uses the GPU.
        hold = self._options.hold() if changes_mode else contextlib.nullcontext()
        try:
            with hold:
                is_changed = change.apply(self._host, _targets_of(config), hooks, log.warning)
        except RebootNeededError as error:
            self._reboot(config, hooks, pause, error)
            return False
        if is_changed:
            self._follow_up(pause)
        return is_changed

    def _load_pause(self) -> Pause:
        try:
            return operands.load(self._options.pause_file) or Pause()
        except ConfigError as error:
            log.error("%s", error.lines())
            return Pause()

    def _hooks(self, name: str) -> commands.HookFile:
        variables = {
            "MIG_PARTED_CONFIG_FILE": self._options.config_file,
            "MIG_PARTED_SELECTED_CONFIG": name,
            "MIG_PARTED_HOOKS_FILE": self._options.hooks_file,
        }
        return commands.HookFile(
            self._options.hooks_file, {key: value for key, value in variables.items() if value}
        )

    def _changes_mode(self, config: MigConfig) -> bool | None:
        """Return whether a MIG mode has to change, None if the GPUs have all of *config*.

        Raises GpuRuntimeError if they cannot get it. What is in use is no obstacle yet: it may be
        an operand, or a service.
        """
        gpus = self._host.state()
        present, targets = states.gpu_states(gpus), _targets_of(config)(gpus)
        if all(target.is_met(present[index]) for index, target in targets.items()):
            return None
        try:
            engine.check(present, targets)
        except InUseError:
            labels = self._node.read().labels
            if not self._options.services and not operands.pauses(labels, self._options.operands):
                raise
        return not all(target.has_mode(present[index]) for index, target in targets.items())

    def _stop_services(self, pause: Pause, *, changes_mode: bool) -> Pause:
        """Stop the services of the host, and return what is paused."""
        services = self._options.services
        names = services.running(changes_mode=changes_mode) if services is not None else ()
        if services is None or not names:
            return pause
        pause = replace(pause, services=tuple(dict.fromkeys((*pause.services, *names))))
        pause.save(self._options.pause_file)
        log.info("services that stop for a change of MIG: %s", ", ".join(names))
        services.stop(names)
        return pause

    def _pause_operands(self, pause: Pause) -> Pause:
        """Pause the operands, wait until their pods are gone, and return what is paused."""
        while True:
            view = self._node.read()
            values = operands.pauses(view.labels, self._options.operands)
            pause = replace(pause, values={**pause.values, **values})
            if values:
                self._has_paused = True
                pause.save(self._options.pause_file)
            labels = {
                **dict.fromkeys(values, operands.PAUSED),
                STATE_LABEL: State.PENDING.value,
            }
            if self._set_labels(view, labels):
                break
        self.state, self._has_paused = State.PENDING, True
        if values:
            words = ", ".join(name.removeprefix(operands.PREFIX) for name in sorted(values))
            self._report("MigOperandsPaused", f"paused for a change of MIG: {words}")
        if pause.values:
            self._wait_for_pods(pause)
        return pause

    def _wait_for_pods(self, pause: Pause) -> None:
        names = [name.removeprefix(operands.PREFIX) for name in pause.values]
        apps = [self._options.operands.get(name, name) for name in names]
        deadline = time.monotonic() + self._options.pods_timeout_s
        while True:
            try:
                pods = self._node.pods(apps)
                if not pods:
                    return
                problem = f"these pods of paused operands still run: {', '.join(pods)}"
            except ApiServerError as error:
                if error.status == FORBIDDEN:
                    raise
                problem = error.message
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise PodsError(
                    f"{problem} ({self._options.pods_timeout_s:g} s after the pause)",
                    "find out why the pods do not end, then set the label again",
                )
            if self._stop.wait(min(_POD_POLL_S, remaining_s)):
                raise StoppedError("stopped")

    def _reboot(
        self, config: MigConfig, hooks: commands.HookFile, pause: Pause, error: RebootNeededError
    ) -> None:
        """Leave the new modes pending and reboot; raise *error* if that is not allowed."""
        if self._options.reboot is None:
            raise RebootNeededError(
                error.message, "allow reboots by --with-reboot, or reboot the node yourself"
            )
        if pause.rebooted_from not in ("", self._options.boot_id):
            raise RebootNeededError(f"{error.message}; a reboot did not help", error.hint)
        # The modes are pending afterwards.
        with contextlib.suppress(RebootNeededError):
            change.apply(
                self._host,
                _targets_of(config, mode_only=True),
                hooks,
                log.warning,
                skip_reset=True,
            )
        replace(pause, rebooted_from=self._options.boot_id).save(self._options.pause_file)
        self._publish(State.REBOOTING)
        self._report("MigRebooting", f"the node reboots: {error.message}")
        try:
            self._options.reboot()
        except CommandError as second:
            raise CommandError(
                f"{second.message}; the new MIG modes stay pending", "reboot the node"
            ) from second

    def _follow_up(self, pause: Pause) -> None:
        """Have others notice the new MIG devices; what fails here does not undo the change."""
        try:
            self._options.refresh()
            if pause.values:
                for pod in self._node.pods([operands.VALIDATOR_APP]):
                    self._node.delete_pod(pod)
        except GpuRuntimeError as error:
            log.warning("%s", error.lines())

    def _fail(
        self, error: GpuRuntimeError, *, restores: bool = True, is_final: bool = True
    ) -> None:
        is_news = self.problem != error.message
        self._note(error)
        self._publish(State.FAILED, restores=restores, is_final=is_final)
        if is_news:
            hint = f" ({error.hint})" if error.hint else ""
            self._report("MigConfigFailed", f"{error.message}{hint}", is_warning=True)

    def _publish(
        self, state: State | None, *, restores: bool = False, is_final: bool = True
    ) -> None:
        """Set the state label to *state*, and restore the operands.

        Repeated until the API server accepts it; raises StoppedError if the service stops first.
        A reboot is remembered unless this is final.
        """
        pause = self._load_pause()
        if restores:
            self._start_services(pause)
        while True:
            try:
                view = self._node.read()
                labels: dict[str, str] = {}
                if restores:
                    labels = operands.restored(view.labels, self._options.operands, pause.values)
                if state is not None and view.labels.get(STATE_LABEL) != state.value:
                    labels[STATE_LABEL] = state.value
                if not labels or self._set_labels(view, labels):
                    break
            except ApiServerError as error:
                log.error("%s", error.lines())
                if self._stop.wait(_RETRY_S):
                    raise StoppedError("stopped") from error
        self.state = state
        if not restores:
            return
        self._may_be_paused = False
        try:
            if pause.rebooted_from and not is_final:
                replace(pause, values={}, services=()).save(self._options.pause_file)
            else:
                journal.remove(self._options.pause_file)
        except ConfigError as error:
            # The next look finds the file, and restores what is restored already.
            log.error("%s", error.lines())

    def _start_services(self, pause: Pause) -> None:
        if self._options.services is None or not pause.services:
            return
        try:
            self._options.services.start(pause.services)
        except CommandError as error:
            # A service that does not start does not keep the operands from it.
            log.error("%s", error.lines())

    def _set_labels(self, view: NodeView, labels: Mapping[str, str]) -> bool:
        """Return whether the labels were set, and not refused as the node has changed."""
        try:
            self._node.set_labels(labels, view.version)
        except ApiServerError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True

    def _note(self, error: GpuRuntimeError) -> None:
        if self.problem != error.message:
            log.error("%s", error.lines())
        self.problem = error.message

    def _report(self, reason: str, message: str, *, is_warning: bool = False) -> None:
        log.log(logging.WARNING if is_warning else logging.INFO, "%s: %s", reason, message)
        try:
            self._node.report(
                reason, escape(message), self._node.read().uid, is_warning=is_warning
            )
        except ApiServerError as error:
            log.warning("%s", error.lines())


def _select(path: str, name: str) -> MigConfig:
    """Return the config *name* of the file *path*; raise ConfigError with the nearest name."""
    configs = mig_config.read(path)
    try:
        return mig_config.select(configs, name)
    except ArgumentError as error:
        nearest = difflib.get_close_matches(name, configs, 1)
        hint = f"the nearest name is {nearest[0]}" if nearest else error.hint
        raise ConfigError(error.message, hint) from None


def _targets_of(
    config: MigConfig, *, mode_only: bool = False
) -> Callable[[Sequence[Mapping[str, Any]]], Mapping[int, Target]]:
    return lambda gpus: states.targets_of(config, gpus, mode_only=mode_only)
