# SPDX-License-Identifier: Apache-2.0
"""When the watcher's child is started, asked, killed and started again: a state machine.

It has no clock and no process: each method gets the time, in seconds of a monotonic clock, and
`advance` returns what to do.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

from gpunode.model import DriverState, DriverStatus
from gpunode.watch.wire import Answer
from gpuruntime import remedies


@dataclass(frozen=True, slots=True)
class Settings:
    """The times of the watcher, in seconds.

    A driver that is loaded for the first time needs *first_deadline_s*. A driver that has no
    answer within its deadline hangs. Telemetry is measured with each poll until *telemetry_s*
    after the last request for it. What a process cannot do is tried again by another after
    *retry_s*.
    """

    poll_s: float = 5.0
    first_deadline_s: float = 30.0
    deadline_s: float = 10.0
    telemetry_s: float = 120.0
    retry_s: float = 60.0
    restart_s: float = 1.0
    max_restart_s: float = 60.0
    grace_s: float = 2.0
    # A child that lives this long is not the next failure of a series.
    steady_s: float = 30.0
    # Children that do not end when they are killed, as they wait in the driver.
    max_abandoned: int = 3


class Action(enum.Enum):
    """What the owner of the child is to do."""

    START = "start"  # a child, and send it a request
    ASK = "ask"
    KILL = "kill"


class _Phase(enum.Enum):
    WAITING = "waiting"  # until the time of the next start
    ASKED = "asked"
    IDLE = "idle"
    ENDING = "ending"  # the child has said that it ends
    KILLED = "killed"
    HELD = "held"  # without a child, until `resume`


class Supervision:
    """The state of the driver and of the child that asks it.

    *jitter* returns a number between 0 and 1.
    """

    def __init__(
        self, settings: Settings, now: float, jitter: Callable[[], float] = random.random
    ) -> None:
        self._settings = settings
        self._jitter = jitter
        self._phase = _Phase.WAITING
        # When the current phase is over.
        self._due = now
        self._asked = now
        self._started = now
        self._failures = 0
        self._abandoned = 0
        self._telemetry_until = now
        self._asks_again = False
        self.status = DriverStatus(DriverState.STARTING, now)

    @property
    def due(self) -> float:
        """When `advance` has something to do; infinite if only an event can change that."""
        if self._phase is _Phase.WAITING and self._is_full():
            return float("inf")
        return self._due

    def wants_telemetry(self, now: float) -> bool:
        """Return whether the next request asks for telemetry."""
        return now < self._telemetry_until

    def request_telemetry(self, now: float) -> None:
        """Have telemetry measured for a while, and soon if it was not measured so far."""
        if not self.wants_telemetry(now):
            # A request that is under way does not ask for it: another one follows at once.
            self.changed(now)
        self._telemetry_until = now + self._settings.telemetry_s

    def advance(self, now: float) -> Action | None:
        """Return the next action that is due at *now*, None for none."""
        if now < self.due:
            return None
        if self._phase is _Phase.WAITING:
            self._started = now
            self._ask(now, self._settings.first_deadline_s)
            return Action.START
        if self._phase is _Phase.IDLE:
            self._ask(now, self._settings.deadline_s)
            return Action.ASK
        if self._phase is _Phase.ASKED:
            self._hang(now)
            return self._kill(now)
        if self._phase is _Phase.ENDING:
            return self._kill(now)
        # A killed process that does not end waits in the driver.
        self._abandoned += 1
        self._failures += 1
        self._wait(now)
        return None

    def hold(self) -> None:
        """Have no child started, until `resume`; the owner ends the present one."""
        self._phase = _Phase.HELD
        self._due = float("inf")

    def resume(self, now: float, *, is_hanging: bool) -> None:
        """Have a child started at once, beside the last one if that *is_hanging*."""
        if self._phase is _Phase.HELD:
            self._abandoned += is_hanging
            self._phase = _Phase.WAITING
            self._due = now

    def answered(self, now: float, answer: Answer) -> None:
        """Note *answer*, which ends the current request."""
        if self._phase is not _Phase.ASKED:
            return
        self._set_status(now, answer.state, answer.reason, answer.hint)
        if answer.ends:
            self._phase = _Phase.ENDING
            self._due = now + self._settings.grace_s
            return
        self._phase = _Phase.IDLE
        self._due = now + (0 if self._asks_again else self._settings.poll_s)
        self._asks_again = False

    def changed(self, now: float) -> None:
        """Note a sign of a change: the driver is asked soon."""
        if self._phase is _Phase.IDLE:
            self._due = min(self._due, now)
        else:
            self._asks_again = self._phase is _Phase.ASKED

    def broken(self, now: float, reason: str) -> Action:
        """Note that the child does not keep to the protocol; return what to do."""
        if self._phase is _Phase.HELD:
            return Action.KILL
        self._set_status(now, DriverState.FAILED, reason, remedies.CHECK_NVIDIA_SMI)
        return self._kill(now)

    def ended(self, now: float, how: str) -> None:
        """Note that the current child has ended: *how* is its status or signal."""
        if self._phase is _Phase.HELD:
            return
        is_steady = now - self._started >= self._settings.steady_s
        if self._phase is _Phase.ENDING:
            self._failures = 0 if is_steady else self._failures + 1
        else:
            self._failures = (
                1 if is_steady and self._phase is not _Phase.KILLED else (self._failures + 1)
            )
        if self._phase in (_Phase.ASKED, _Phase.IDLE) and (
            self._failures > 1 or self.status.state is not DriverState.READY
        ):
            # One such end is not yet a fault of the driver.
            reason = f"the process that calls NVML ended, {how}"
            self._set_status(now, DriverState.FAILED, reason, remedies.CHECK_NVIDIA_SMI)
        self._wait(now)

    def start_failed(self, now: float, reason: str) -> None:
        """Note that no child could be started."""
        hint = "end other processes, or raise the limit on their number"
        self._set_status(now, DriverState.FAILED, reason, hint)
        self._failures += 1
        self._wait(now)

    def abandoned_ended(self, now: float) -> None:
        """Note that a child has ended that was abandoned: the driver answers again."""
        self._abandoned -= 1
        if self._phase is _Phase.WAITING:
            self._due = min(self._due, now + self._settings.restart_s)

    def _is_full(self) -> bool:
        return self._abandoned >= self._settings.max_abandoned

    def _ask(self, now: float, deadline_s: float) -> None:
        self._phase = _Phase.ASKED
        self._asked = now
        self._due = now + deadline_s

    def _hang(self, now: float) -> None:
        reason = f"the driver has not answered for {now - self._asked:.0f} s"
        since = self._asked
        if self.status.state is DriverState.HANGING:
            since = self.status.since
        self.status = DriverStatus(DriverState.HANGING, since, reason, remedies.CHECK_LOG)

    def _kill(self, now: float) -> Action:
        self._phase = _Phase.KILLED
        self._due = now + self._settings.grace_s
        return Action.KILL

    def _wait(self, now: float) -> None:
        self._phase = _Phase.WAITING
        delay_s = 0.0
        if self._failures > 0:
            longest_s = self._settings.restart_s * 2.0 ** min(self._failures - 1, 16)
            longest_s = min(longest_s, self._settings.max_restart_s)
            delay_s = longest_s * (0.5 + self._jitter() / 2)
        self._due = now + delay_s

    def _set_status(self, now: float, state: DriverState, reason: str, hint: str) -> None:
        if (state, reason, hint) == (self.status.state, self.status.reason, self.status.hint):
            return
        since = self.status.since if state is self.status.state else now
        self.status = DriverStatus(state, since, reason, hint)
