# SPDX-License-Identifier: Apache-2.0
"""Processor time that a part of a test takes; unlike wall time, it does not depend on load."""

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
    """Fail if the context, with its children, takes *seconds* of processor time or more."""
    before = spent()
    yield
    used = spent() - before
    assert used < seconds, f"{used:.1f} s of processor time"
