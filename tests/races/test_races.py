# SPDX-License-Identifier: Apache-2.0
"""Races, short: 150 tries with what is attacked held up, controls that lose three times at least.

`make races` runs them for long.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from races import play

pytestmark = pytest.mark.system("strace", "unshare")
TRIES = 150
LEAST = 3
Told = Callable[[str, object], None]


@pytest.mark.parametrize("way", play.WAYS)
def test_race_02_a_mount_is_never_outside(way: str, record_property: Told) -> None:
    """Each mount is delayed until the attacker has had a turn."""
    seen = play.mounts(way, TRIES, 2 * TRIES)
    record_property("summary", str(seen))
    assert seen.escapes == 0
    assert seen.control is not None
    assert seen.control >= LEAST


@pytest.mark.catalogue("RACE-01", "RACE-03", "RACE-04", "RACE-05")
@pytest.mark.parametrize("name", play.BELOW)
def test_three_attackers_lead_nobody_out(name: str, record_property: Told) -> None:
    """The way that kernels without openat2(2) go."""
    seen = play.below_root(name, "WALK", TRIES, LEAST, attackers=3)
    record_property("summary", str(seen))
    assert seen.escapes == 0
    assert seen.control is not None
    assert seen.control >= LEAST


def test_race_06_a_store_that_is_killed_leaves_old_or_new() -> None:
    """Mode and owner are kept, and a store in place loses."""
    seen = play.config_crashes()
    assert seen.escapes == 0
    assert seen.tries > 10
    assert seen.control


@pytest.mark.parametrize("race", [play.two_stores, play.spec_reads])
@pytest.mark.catalogue("RACE-06", "RACE-07")
def test_two_writers_at_once_are_one_after_the_other(race: Callable[[int], play.Outcome]) -> None:
    """Who reads meanwhile reads a whole document, and no file is left over."""
    seen = race(TRIES)
    assert seen.escapes == 0
    assert seen.control is not None
    assert seen.control >= LEAST


def test_race_08_many_answers_of_eagain() -> None:
    """A busy attacker is no reason to go on for ever."""
    assert play.eagain(50).escapes == 0


def test_race_10_refreshes_at_once_leave_one_spec() -> None:
    """Also while a library of the driver comes and goes."""
    assert play.refresh_storm(6).escapes == 0
