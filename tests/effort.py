# SPDX-License-Identifier: Apache-2.0
"""How often a run tries a law: often enough to see it broken, or as GPURUNTIME_TEST_ALL wants it.

What Hypothesis tries where a test does not say how often is set in conftest.py.
"""

from __future__ import annotations

import os

IS_FULL = bool(os.environ.get("GPURUNTIME_TEST_ALL"))
# Of fewer examples than that Hypothesis makes simple ones only.
FEWEST = 25


def tries(number: int) -> int:
    """Return how often to try what a whole run tries *number* times."""
    return number if IS_FULL else min(number, max(FEWEST, number // 6))
