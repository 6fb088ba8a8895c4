# SPDX-License-Identifier: Apache-2.0
"""A short run of each fuzz target, the same every time; `make fuzz SECONDS=…` runs them longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzz import targets

EXECUTIONS = {"load": 4000, "save": 1000, "twice": 1000, "require": 1000}


@pytest.mark.property
@pytest.mark.parametrize("name", targets.TARGETS)
def test_no_input_breaks_a_promise(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """Nothing but our own errors, no waste of time, nothing lost."""
    line = targets.run(name, 1, EXECUTIONS[name])
    record_property("summary", line)
    assert f"{EXECUTIONS[name]} executions" in line
