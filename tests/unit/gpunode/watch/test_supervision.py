# SPDX-License-Identifier: Apache-2.0
"""When the watcher's child is started, asked, killed and started again, over virtual time."""

from __future__ import annotations

import dataclasses

import pytest

from gpunode.model import DriverState
from gpunode.watch.supervision import Action, Settings, Supervision
from gpunode.watch.wire import Answer

SETTINGS = Settings()
READY = Answer(
    state=DriverState.READY,
    reason="",
    hint="",
    model=None,
    energy={},
    load="",
    telemetry=None,
    ends=False,
)
ABSENT = dataclasses.replace(
    READY, state=DriverState.ABSENT, reason="no driver", hint="install it"
)
ENDS = dataclasses.replace(READY, ends=True)


class Owner:
    """The owner of a child, with a clock that jumps to whatever is due next."""

    def __init__(self, jitter: float = 1.0) -> None:
        self.now = 1000.0
        self.supervision = Supervision(SETTINGS, self.now, lambda: jitter)
        # Time since the start → action.
        self.log: list[tuple[float, Action]] = []

    @property
    def state(self) -> DriverState:
        """The state of the driver."""
        return self.supervision.status.state

    def next(self) -> Action:
        """Let time pass until an action is due, and return it."""
        while True:
            self.now = max(self.now, self.supervision.due)
            action = self.supervision.advance(self.now)
            if action is not None:
                self.log.append((self.now - 1000, action))
                return action

    def started(self, answer: Answer = READY) -> None:
        """Start the child, which gives *answer* half a second later."""
        assert self.next() is Action.START
        self.now += 0.5
        self.supervision.answered(self.now, answer)


def test_an_idle_driver_is_polled_every_five_seconds() -> None:
    """From the answer on, so that a slow driver is not asked without a break."""
    owner = Owner()
    owner.started()
    for _ in range(3):
        assert owner.next() is Action.ASK
        owner.now += 1
        owner.supervision.answered(owner.now, READY)
    assert [time for time, _ in owner.log] == [0, 5.5, 11.5, 17.5]
    assert owner.supervision.status.since == 1000.5


def test_the_first_answer_has_a_longer_deadline() -> None:
    """A cold driver takes long; until then the state is STARTING."""
    owner = Owner()
    assert owner.next() is Action.START
    owner.supervision.advance(owner.now + SETTINGS.first_deadline_s - 0.1)
    assert owner.state is DriverState.STARTING
    assert owner.next() is Action.KILL
    assert owner.state is DriverState.HANGING
    assert owner.now == 1000 + SETTINGS.first_deadline_s


def test_a_driver_without_an_answer_hangs_since_it_was_asked() -> None:
    """Through all attempts, until it answers."""
    owner = Owner()
    owner.started()
    assert owner.next() is Action.ASK
    asked = owner.now
    assert owner.next() is Action.KILL
    assert owner.now == asked + SETTINGS.deadline_s
    owner.supervision.ended(owner.now, "signal 9")
    assert owner.next() is Action.START
    assert owner.next() is Action.KILL
    assert (owner.state, owner.supervision.status.since) == (DriverState.HANGING, asked)
    owner.supervision.ended(owner.now, "signal 9")
    owner.started()
    assert (owner.state, owner.supervision.status.since) == (DriverState.READY, owner.now)


def test_a_late_answer_of_a_killed_child_changes_nothing() -> None:
    """It was on its way when the deadline came."""
    owner = Owner()
    owner.started()
    assert [owner.next(), owner.next()] == [Action.ASK, Action.KILL]
    owner.supervision.answered(owner.now, READY)
    assert owner.state is DriverState.HANGING


@pytest.mark.parametrize(("jitter", "share"), [(1.0, 1.0), (0.0, 0.5)])
def test_restarts_of_a_child_that_dies_are_further_and_further_apart(
    jitter: float, share: float
) -> None:
    """Doubled up to a minute, each with a random share between half and the whole."""
    owner = Owner(jitter)
    pauses = []
    for _ in range(9):
        assert owner.next() is Action.START
        owner.supervision.ended(owner.now, "signal 11")
        pauses.append(owner.supervision.due - owner.now)
    assert pauses == [pause * share for pause in (1, 2, 4, 8, 16, 32, 60, 60, 60)]
    assert owner.state is DriverState.FAILED
    assert "signal 11" in owner.supervision.status.reason


def test_one_death_of_the_child_is_no_fault_of_a_ready_driver() -> None:
    """The second in a row is."""
    owner = Owner()
    owner.started()
    owner.supervision.ended(owner.now, "signal 11")
    assert owner.state is DriverState.READY
    assert owner.next() is Action.START
    owner.supervision.ended(owner.now, "signal 11")
    assert owner.state is DriverState.FAILED


@pytest.mark.parametrize(
    ("lifetime_s", "pauses"), [(60.0, [0, 0, 0]), (1.0, [1, 2, 4])], ids=["steady", "short"]
)
def test_a_child_that_ends_by_itself_is_followed_at_once(
    lifetime_s: float, pauses: list[float]
) -> None:
    """Unless each of them ends soon."""
    owner = Owner()
    seen = []
    for _ in pauses:
        assert owner.next() is Action.START
        owner.now += lifetime_s
        owner.supervision.answered(owner.now, ENDS)
        owner.supervision.ended(owner.now, "status 0")
        seen.append(owner.supervision.due - owner.now)
    assert seen == pauses
    assert owner.state is DriverState.READY


def test_a_child_that_does_not_end_as_it_says_is_killed() -> None:
    """Its exit can wait for the driver as well."""
    owner = Owner()
    owner.started(ENDS)
    assert owner.next() is Action.KILL
    assert owner.now == 1000.5 + SETTINGS.grace_s


def test_few_children_are_abandoned_to_a_driver_that_holds_them() -> None:
    """No more are started until one of them ends."""
    owner = Owner()
    for _ in range(SETTINGS.max_abandoned):
        assert [owner.next(), owner.next()] == [Action.START, Action.KILL]
        owner.now = owner.supervision.due
        assert owner.supervision.advance(owner.now) is None
    assert owner.supervision.due == float("inf")
    assert owner.supervision.advance(owner.now + 1e6) is None
    owner.supervision.abandoned_ended(owner.now)
    ended = owner.now
    owner.started()
    assert owner.now == ended + SETTINGS.restart_s + 0.5
    assert owner.state is DriverState.READY


def test_a_sign_of_a_change_is_followed_at_once() -> None:
    """Also one that comes while the driver is asked."""
    owner = Owner()
    owner.started()
    owner.supervision.changed(owner.now)
    assert owner.next() is Action.ASK
    owner.supervision.changed(owner.now)
    owner.supervision.answered(owner.now, READY)
    assert owner.next() is Action.ASK
    assert owner.now == 1000.5


def test_telemetry_is_measured_while_somebody_wants_it() -> None:
    """At once after the first request, and with each poll for two minutes."""
    owner = Owner()
    owner.started()
    assert not owner.supervision.wants_telemetry(owner.now)
    owner.supervision.request_telemetry(owner.now)
    requested = owner.now
    assert owner.next() is Action.ASK
    assert owner.now == requested
    while owner.supervision.wants_telemetry(owner.now):
        owner.supervision.answered(owner.now, READY)
        assert owner.next() is Action.ASK
    assert owner.now - requested == pytest.approx(SETTINGS.telemetry_s, abs=SETTINGS.poll_s)


def test_telemetry_that_is_requested_during_a_poll_is_measured_after_it() -> None:
    """That poll was sent without the request; the next one is not a whole interval later."""
    owner = Owner()
    assert owner.next() is Action.START
    owner.supervision.request_telemetry(owner.now)
    owner.now += 0.5
    owner.supervision.answered(owner.now, READY)
    assert owner.next() is Action.ASK
    assert owner.now == 1000.5


def test_the_state_of_an_absent_driver_keeps_its_time_and_reason() -> None:
    """Each poll says the same; another reason does not make it younger."""
    owner = Owner()
    owner.started(ABSENT)
    assert owner.next() is Action.ASK
    owner.supervision.answered(owner.now, dataclasses.replace(ABSENT, reason="no module"))
    status = owner.supervision.status
    assert (status.state, status.since) == (DriverState.ABSENT, 1000.5)
    assert (status.reason, status.hint) == ("no module", "install it")


def test_a_child_that_breaks_the_protocol_is_killed() -> None:
    """With the reason in the state."""
    owner = Owner()
    assert owner.next() is Action.START
    assert owner.supervision.broken(owner.now, "not a frame") is Action.KILL
    owner.supervision.ended(owner.now, "signal 9")
    assert (owner.state, owner.supervision.status.reason) == (DriverState.FAILED, "not a frame")
    owner.started()
    assert owner.state is DriverState.READY


def test_a_child_that_cannot_be_started_is_tried_again() -> None:
    """The machine may have too many processes for a while."""
    owner = Owner()
    assert owner.next() is Action.START
    owner.supervision.start_failed(owner.now, "cannot start: Resource temporarily unavailable")
    assert owner.state is DriverState.FAILED
    owner.started()
    assert owner.now == 1001.5


@pytest.mark.parametrize("is_hanging", [False, True])
def test_no_child_is_started_while_it_is_held(*, is_hanging: bool) -> None:
    """The end of the child is no fault, and the next one is started at once."""
    owner = Owner()
    owner.started()
    owner.supervision.hold()
    if not is_hanging:
        owner.supervision.ended(owner.now, "exit status 0")
    assert owner.supervision.due == float("inf")
    assert owner.supervision.advance(owner.now + 1000) is None
    assert owner.state is DriverState.READY
    owner.now += 60
    owner.supervision.resume(owner.now, is_hanging=is_hanging)
    assert owner.next() is Action.START
    assert owner.log[-1][0] == 60.5
    for _ in range(SETTINGS.max_abandoned - 1):
        owner.supervision.hold()
        owner.supervision.resume(owner.now, is_hanging=is_hanging)
    # Only so many may hang.
    assert (owner.supervision.due == float("inf")) == is_hanging
