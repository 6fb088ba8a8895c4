# SPDX-License-Identifier: Apache-2.0
"""Loading specs costs a small multiple of decoding them: `make perf` prints the whole measure."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from perf import cdi_load


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="perf: valgrind is not installed")
@pytest.mark.parametrize("detailed", [False, True], ids=["usual", "detailed"])
def test_loading_costs_at_most_three_times_the_decoding(
    detailed: bool, record_property: Callable[[str, object], None]
) -> None:
    """Every container start of a node reads every spec of it."""
    parse, load = cdi_load.measure(detailed, specs=8)
    record_property("summary", f"loading CDI specs: {load / parse:.2f} x json's instructions")
    assert parse > 1_000_000
    assert load <= cdi_load.LIMIT * parse
