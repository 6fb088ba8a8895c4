# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: a test that hangs fails with a traceback, and the run goes on.

The setup, the call and the teardown of a test may each take LIMIT_S, or as many seconds as its
mark says: `@pytest.mark.deadline(400)`. A timer then interrupts the main thread, again every
AGAIN_S while the test handles that. There is no thread that could end the process as well: many
tests fork, which needs a process of one thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from types import FrameType

import effort
import pytest

LIMIT_S = 240.0
AGAIN_S = 20.0
# The full matrices have more containers in one fixture.
FACTOR = 5 if effort.IS_FULL else 1


class DeadlineError(BaseException):
    """The test took too long. No `except Exception` hides it, and hypothesis does not retry it."""


def pytest_configure(config: pytest.Config) -> None:
    """Add the mark."""
    config.addinivalue_line("markers", "deadline(seconds): how long each phase may take")


def seconds_of(item: pytest.Item) -> float:
    """Return how long each phase of *item* may take."""
    marker = item.get_closest_marker("deadline")
    return FACTOR * (marker.args[0] if marker else LIMIT_S)


def _interrupt(item: pytest.Item, phase: str, seconds: float) -> None:
    """Have a timer interrupt this thread after *seconds* of *phase*."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise DeadlineError(f"{item.nodeid}: {phase} took more than {seconds:g} s")

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)


def _stop() -> None:
    """End the timer of the phase."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _phase(item: pytest.Item, name: str) -> Generator[None, object, object]:
    """Run a phase of *item* with its deadline."""
    _interrupt(item, name, seconds_of(item))
    try:
        return (yield)
    finally:
        _stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the fixtures of *item*."""
    return (yield from _phase(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Limit *item* itself."""
    return (yield from _phase(item, "call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the end of the fixtures of *item*."""
    return (yield from _phase(item, "teardown"))


# A child of a test ends by the signal, and has no timer.
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL))
