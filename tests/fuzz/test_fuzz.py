# SPDX-License-Identifier: Apache-2.0
"""A short run of each fuzz target, the same every time; `make fuzz SECONDS=…` runs them longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from effort import IS_FULL
from fuzz import targets

EXECUTIONS = {
    "load": 4000,
    "save": 1000,
    "twice": 1000,
    "require": 1000,
    "note": 4000,
    "launcher": 2,
    "replay": 3,
}


@pytest.mark.property
@pytest.mark.parametrize("name", targets.TARGETS)
def test_no_input_breaks_a_promise(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """Nothing but our own errors, no waste of time, nothing lost."""
    executions = EXECUTIONS.get(name, 500)
    if not IS_FULL:
        executions = (executions + 3) // 4
    result = targets.run(name, 1, executions)
    record_property("summary", result.line)
    assert result.executions == executions


def test_a_target_that_covers_little_is_seen() -> None:
    """A corpus that the parser refuses at once would not show."""
    few = targets.Result("few", 1, {"a.py": (84, 100), "b.py": (0, 0)})
    assert few.percent < targets.LEAST_COVERED
