# SPDX-License-Identifier: Apache-2.0
"""`cdi generate` stays within its budgets of instructions; `make perf` prints all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from perf import generate

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("valgrind") is None,
        reason="valgrind is not installed: the instructions of cdi generate are not counted",
    ),
]


@pytest.mark.parametrize("name", ["8 GPUs", "56 MIG devices, to a file"])
def test_generating_a_spec_stays_within_its_budget(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """Boot runs it, and each refresh after a change of the host."""
    options, words, limit = generate.BUDGETS[name]
    ratio = generate.generate(options, words) / generate.imports()
    record_property("summary", f"cdi generate, {name}: {ratio:.2f} x the imports (limit {limit})")
    assert ratio > 1
    assert ratio <= limit
