# SPDX-License-Identifier: Apache-2.0
"""Preferred allocations: which units of a resource a container gets; pure and deterministic.

Whole GPUs are aligned: the set with the best links among its GPUs, and of equal sets the one that
takes the least from the GPUs that remain. So a request of one GPU leaves pairs whole. Shared GPUs
and MIG devices are distributed or packed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from gpunode.config import settings
from gpunode.devices import Device, DeviceUnit, Resource
from gpunode.model import Link, NodeModel, Topology

_NVLINK_SCORE = 100
# The best of at most this many sets is determined exactly, in a few milliseconds: enough for any
# number of 16 GPUs. Of more sets, a good one is improved by at most this many swaps.
_MAX_SETS = 13_000
_MAX_SWAPS = 8


@dataclass(frozen=True, slots=True)
class Scores:
    """How close each pair of GPUs is: {UUID, UUID} → score; *problems* are faults of the links."""

    pairs: Mapping[frozenset[str], int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def of(self, a: str, b: str) -> int:
        """Return the score of the GPUs *a* and *b*, 0 if it is unknown."""
        return self.pairs.get(frozenset((a, b)), 0)


def scores(model: NodeModel) -> Scores:
    """Return the scores of all pairs of GPUs of *model*.

    The two directions of a pair may differ: the lower value counts. A GPU that is lost has no
    links, and the pairs of the others are not affected.
    """
    pairs: dict[frozenset[str], int] = {}
    problems = []
    for i, one in enumerate(model.gpus):
        for other in model.gpus[i + 1 :]:
            a, b = one.gpu.uuid, other.gpu.uuid
            directions = [
                link for link in (model.links.get((a, b)), model.links.get((b, a))) if link
            ]
            counts = {link.nvlinks for link in directions}
            if len(counts) > 1:
                problems.append(
                    f"GPU {one.gpu.index} and GPU {other.gpu.index} report different numbers of "
                    f"NVLinks to each other: {min(counts)} and {max(counts)}; the lower one counts"
                )
            numa_nodes = {one.numa_node, other.numa_node}
            pairs[frozenset((a, b))] = _score(
                directions, is_near=numa_nodes != {None} and len(numa_nodes) == 1
            )
    return Scores(pairs, tuple(problems))


def _score(directions: Sequence[Link], *, is_near: bool) -> int:
    """Return the score of a pair; *is_near*: the GPUs are on one NUMA node."""
    if not directions:
        return 0
    topology = min(link.topology for link in directions)
    if topology is Topology.UNKNOWN:
        topology = Topology.NODE if is_near else Topology.SYSTEM
    return topology + _NVLINK_SCORE * min(link.nvlinks for link in directions)


def preferred(
    resource: Resource,
    scores_: Scores,
    policy: str,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> tuple[str, ...]:
    """Return *size* of the ids *available* with all of *must_include*, in the resource's order.

    Returns () if there is no such set. *policy* is that of shared units, settings.DISTRIBUTED or
    PACKED. Ids that the resource does not have are never returned.
    """
    by_id = {unit.id: unit for unit in resource.units}
    candidates = dict.fromkeys(name for name in available if name in by_id)
    required = dict.fromkeys(must_include)
    if size <= 0 or len(required) > size or len(candidates) < size:
        return ()
    if not all(name in candidates for name in required):
        return ()
    free = [unit for unit in resource.units if unit.id in candidates and unit.id not in required]
    chosen = [by_id[name] for name in required]
    if all(unit.replica is None and not unit.device.is_mig for unit in resource.units):
        chosen = _aligned(free, chosen, size, scores_)
    else:
        chosen += _spread(resource, free, size - len(chosen), is_packed=policy == settings.PACKED)
    ids = {unit.id for unit in chosen}
    return tuple(unit.id for unit in resource.units if unit.id in ids)


def _aligned(
    free: Sequence[DeviceUnit], required: Sequence[DeviceUnit], size: int, scores_: Scores
) -> list[DeviceUnit]:
    """Return *required* and units of *free*, *size* together, with the best score."""
    units = [*required, *free]
    uuids = [unit.device.uuid for unit in units]
    matrix = [[scores_.of(a, b) if a != b else 0 for b in uuids] for a in uuids]
    choice = _Choice(matrix, len(required), size)
    return [units[i] for i in choice.best()]


class _Choice:
    """The choice of *size* rows of a symmetric *matrix*, among them the first *required* ones.

    The value of a set is the sum of the scores of its pairs; of equal sets, the one with the
    smallest sum of scores to the other rows is better, then the first in order.
    """

    def __init__(self, matrix: Sequence[Sequence[int]], required: int, size: int) -> None:
        self.matrix = matrix
        self.required = required
        self.size = size
        self.count = len(matrix)
        # The sum of scores to the others is that of the rows, less twice that of the pairs. So
        # a large weight for pairs, less the sums of rows, orders sets as described.
        rows = [sum(row) for row in matrix]
        self.weight = 2 * sum(rows) + 1
        self.costs = rows

    def best(self) -> list[int]:
        """Return the rows of the best set, in order."""
        if self.size == self.required:
            return list(range(self.size))
        sets = math.comb(self.count - self.required, self.size - self.required)
        return self._best_of_all() if sets <= _MAX_SETS else self._improved()

    def _value(self, chosen: Iterable[int]) -> int:
        rows = list(chosen)
        pairs = sum(self.matrix[a][b] for i, a in enumerate(rows) for b in rows[i + 1 :])
        return self.weight * pairs - sum(self.costs[row] for row in rows)

    def _best_of_all(self) -> list[int]:
        """Return the best set, the first in order of equal ones.

        A branch is left when even the best scores could not make its sets better.
        """
        best = self._improved()
        # One less than a set that exists: of its equals, the first in order replaces it.
        best_value = self._value(best) - 1
        limits = self._limits()
        weighted = [[self.weight * score for score in row] for row in self.matrix]
        chosen = list(range(self.required))

        def extend(start: int, value: int, gains: list[int]) -> None:
            """Try all rows from *start* on; *gains* are what each of them adds to *value*."""
            nonlocal best, best_value
            missing = self.size - len(chosen)
            if missing == 1:
                gain = max(gains)
                if value + gain > best_value:
                    best_value = value + gain
                    best = [*chosen, start + gains.index(gain)]
                return
            if value + sum(sorted(gains)[-missing:]) + limits[missing] <= best_value:
                return
            for i in range(len(gains) - missing + 1):
                row = start + i
                chosen.append(row)
                scores_of_row = weighted[row][row + 1 :]
                extend(row + 1, value + gains[i], list(map(add, gains[i + 1 :], scores_of_row)))
                chosen.pop()

        gains = [self._gain(row, chosen) for row in range(self.required, self.count)]
        extend(self.required, self._value(chosen), gains)
        return best

    def _limits(self) -> list[int]:
        """Return for each number of rows the largest value that its pairs can have."""
        limits = []
        for number in range(self.size + 1):
            sums = sorted(sum(sorted(row)[len(row) - number + 1 :]) for row in self.matrix)
            limits.append(self.weight * sum(sums[len(sums) - number :]) // 2 if number > 1 else 0)
        return limits

    def _improved(self) -> list[int]:
        """Return a good set: the best that grows from one row, improved by swaps."""
        grown = [self._grown(seed) for seed in range(self.required, self.count)]
        chosen = min(grown, key=lambda rows: (-self._value(rows), rows))
        for _ in range(_MAX_SWAPS):
            swap = self._best_swap(chosen)
            if swap is None:
                break
            chosen = sorted({*chosen, swap[1]} - {swap[0]})
        return chosen

    def _grown(self, seed: int) -> list[int]:
        """Return the set that begins with *seed* and gets the row with the largest gain next."""
        chosen = [*range(self.required), seed]
        gains = {
            row: self._gain(row, chosen) for row in range(self.required, self.count) if row != seed
        }
        while len(chosen) < self.size:
            best = max(gains, key=gains.__getitem__)
            del gains[best]
            chosen.append(best)
            scores_of_row = self.matrix[best]
            for row in gains:
                gains[row] += self.weight * scores_of_row[row]
        return sorted(chosen)

    def _gain(self, row: int, chosen: Iterable[int]) -> int:
        pairs = sum(self.matrix[row][other] for other in chosen if other != row)
        return self.weight * pairs - self.costs[row]

    def _best_swap(self, chosen: Sequence[int]) -> tuple[int, int] | None:
        """Return the row to remove and the row to add, None if no swap is an improvement."""
        taken = set(chosen)
        losses = {row: self._gain(row, chosen) for row in chosen if row >= self.required}
        gains = {row: self._gain(row, chosen) for row in range(self.count) if row not in taken}
        best: tuple[int, int, int] | None = None
        for old, loss in losses.items():
            for new, gain in gains.items():
                improvement = gain - self.weight * self.matrix[old][new] - loss
                if improvement > 0 and (best is None or improvement > best[0]):
                    best = improvement, old, new
        return None if best is None else best[1:]


def _spread(
    resource: Resource, free: Sequence[DeviceUnit], count: int, *, is_packed: bool
) -> list[DeviceUnit]:
    """Return *count* units of *free* from the GPUs with the fewest units taken, or the most.

    Of equal GPUs, the one with the fewest picks of this call is next, then the first in order. The
    MIG devices of a GPU are ordered in the same way.
    """
    sign = -1 if is_packed else 1
    totals = Counter(unit.device.uuid for unit in resource.units)
    totals.update(unit.device.gpu_uuid for unit in resource.units if unit.device.is_mig)
    waiting: dict[str, list[DeviceUnit]] = {}
    devices_of: dict[str, dict[str, Device]] = {}
    # Of each GPU and of each MIG device, by UUID.
    available: Counter[str] = Counter()
    picks: Counter[str] = Counter()
    for unit in reversed(free):
        device = unit.device
        waiting.setdefault(device.uuid, []).append(unit)
        devices_of.setdefault(device.gpu_uuid, {})[device.uuid] = device
        available.update({device.uuid, device.gpu_uuid})
    positions = {
        gpu: min(device.position[0] for device in members.values())
        for gpu, members in devices_of.items()
    }

    def order(uuid: str) -> tuple[int, int]:
        """Return what is compared of a GPU or MIG device before its position."""
        return sign * (totals[uuid] - available[uuid]), picks[uuid]

    chosen = []
    for _ in range(count):
        gpu = min(
            (gpu for gpu in devices_of if available[gpu]),
            key=lambda gpu: (*order(gpu), positions[gpu]),
        )
        device = min(
            (device for name, device in devices_of[gpu].items() if waiting[name]),
            key=lambda device: (*order(device.uuid), device.position),
        )
        chosen.append(waiting[device.uuid].pop())
        for name in {device.uuid, gpu}:
            available[name] -= 1
            picks[name] += 1
    return chosen
