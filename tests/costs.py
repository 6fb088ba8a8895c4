# SPDX-License-Identifier: Apache-2.0
"""What a piece of a test costs in processor time: whatever else the machine does meanwhile."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def spent() -> float:
    """Return the seconds of processor time of this process and of children that have ended."""
    used = [resource.getrusage(part) for part in PARTS]
    return sum(part.ru_utime + part.ru_stime for part in used)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if what is done in the context, also by children, takes more *seconds* than that."""
    before = spent()
    yield
    used = spent() - before
    assert used < seconds, f"{used:.1f} s of processor time"
