# SPDX-License-Identifier: Apache-2.0
"""A test that hangs is interrupted, and named."""

from __future__ import annotations

import os
import signal
import time

import deadline
import pytest

SHORT_S = 1.0 / deadline.FACTOR
LONG_S = 30.0


def limited(item: pytest.Item, seconds: float) -> pytest.Item:
    """Return *item* with the mark of a deadline of *seconds*."""
    item.add_marker(pytest.mark.deadline(seconds), append=False)
    return item


def swallow_all() -> None:
    """Hang, whatever is raised."""
    try:
        time.sleep(LONG_S)
    except Exception:  # noqa: BLE001 (as a test may do)
        time.sleep(LONG_S)


@pytest.mark.slow
def test_a_phase_that_hangs_is_interrupted(request: pytest.FixtureRequest) -> None:
    """Also where it catches all exceptions."""
    began = time.monotonic()
    phase = deadline._phase(limited(request.node, SHORT_S), "call")
    next(phase)
    with pytest.raises(deadline.DeadlineError, match=r"is_interrupted: call took more than 1 s"):
        swallow_all()
    phase.close()
    assert time.monotonic() - began < LONG_S / 2


def test_a_phase_that_ends_in_time_is_not(request: pytest.FixtureRequest) -> None:
    """The control: its timer ends with it."""
    phase = deadline._phase(limited(request.node, SHORT_S), "call")
    next(phase)
    phase.close()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.slow
def test_a_child_of_a_test_ends_by_the_signal() -> None:
    """It is no exception in there: the child may be a program that has its own timers."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(1)
        time.sleep(LONG_S)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGALRM
