# SPDX-License-Identifier: Apache-2.0
"""Medians, percentiles and ratios of samples: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile *share* of *values*, interpolated between the two nearest.

    Raises IndexError if there are no values.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Summary:
    """The summary of samples in a row of a table."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Return the median of *values*, and their 10th and 90th percentiles."""
        return cls(
            statistics.median(values), quantile(values, 0.1), quantile(values, 0.9), len(values)
        )


def over(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the differences from *base* within each round.

    Load on the machine during a round slows both values. Raises ValueError if the numbers of
    rounds differ.
    """
    return statistics.median(value - other for value, other in zip(values, base, strict=True))


def ratio(values: Sequence[float], base: Sequence[float], both: float = 0.0) -> float:
    """Return the ratio of the medians, after *both* is subtracted from each of them."""
    return (statistics.median(values) - both) / (statistics.median(base) - both)
