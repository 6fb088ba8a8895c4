# SPDX-License-Identifier: Apache-2.0
"""How much the tests do.

A property test tries few examples, or all of them with GPURUNTIME_TEST_ALL. The default of tests
that name no number is set in conftest.py. With GPURUNTIME_TEST_SHORT, the examples are the same
each time, and the tests of a release do not run (release_tests.py).
"""

from __future__ import annotations

import os

IS_SHORT = bool(os.environ.get("GPURUNTIME_TEST_SHORT"))
IS_FULL = bool(os.environ.get("GPURUNTIME_TEST_ALL"))
# With fewer examples, Hypothesis generates only simple ones.
FEWEST = 25


def tries(number: int) -> int:
    """Return how many examples to try of the *number* that a full run tries."""
    return number if IS_FULL else min(number, max(FEWEST, number // 6))
