# SPDX-License-Identifier: Apache-2.0
"""Medians, percentiles and ratios of samples. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], share: float) -> float:
    """Return what *share* of *values* lie below, by the line between the two nearest.

    Raises IndexError if there are no values.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Summary:
    """What a row of a table shows of its samples."""

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
    """Return the median of the differences to *base* in the same repetition.

    What slows the machine down for some repetitions slows both down. Raises ValueError if one has
    more repetitions than the other.
    """
    return statistics.median(value - other for value, other in zip(values, base, strict=True))


def ratio(values: Sequence[float], base: Sequence[float], both: float = 0.0) -> float:
    """Return the ratio of the medians; *both* is in each of them, and in neither's account."""
    return (statistics.median(values) - both) / (statistics.median(base) - both)
