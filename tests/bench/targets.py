# SPDX-License-Identifier: Apache-2.0
"""The measurements compared with the limits of the start path. Pure.

*results* is what measure.py leaves as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bench.cases import BASE, EIGHT, EIGHT_ALL, LIFE, MANY, NONE
from bench.figures import over, ratio

Results = dict[str, Any]
# Over bare runc, in ms; of bare runc; of a start of the bare interpreter.
OTHERS_MS, CREATE_MS = 1.2, 1.5
EIGHT_RATIO, ALL_RATIO, EDITS_RATIO, MANY_RATIO, COLD_RATIO = 2.2, 2.7, 1.45, 1.15, 2.6
# Of runc with the same edits and no hook, and of another toolkit at its best, if one is measured.
NO_HOOK_RATIO, OTHER_RATIO = 1.5, 0.5
PEAK_MIB = 16
LAUNCHER_SHARE, SHIM_SHARE, HOOK_SHARE = 0.02, 2.0, 1.8
# Wall clock, of a bare Python start: all the work of the hook in a container.
HOOK_WALL = 2.7
A_BYTE = 6
OTHERS = ("start", "state", "kill", "delete", "exec")
BARE = "runc, without the stand-in"


class Row(NamedTuple):
    """One limit: the operation, the limit, the measured value, and whether the limit is met."""

    what: str
    limit: str
    measured: str
    is_met: bool


def walls(
    results: Results, case: str, operation: str = "create", host: str = "jit-cdi"
) -> list[float]:
    """Return the samples in ms; those of "life" are the sums of the operations of LIFE."""
    operations = results["lives"][f"{host}: {case}"]
    if operation == "life":
        lives = zip(*(operations[name] for name in LIFE), strict=True)
        return [sum(sample[0] for sample in samples) for samples in lives]
    return [sample[0] for sample in operations[operation]]


def stand_in(results: Results) -> float:
    """Return the cost of the hook that shows /proc/driver, which a real host does not have."""
    return max(0.0, over(walls(results, BASE), walls(results, BARE)))


def create_ratio(results: Results, case: str, base: str = BASE, host: str = "jit-cdi") -> float:
    """Return the ratio of two creates, both without the cost of the stand-in."""
    return ratio(
        walls(results, case, host=host), walls(results, base, host=host), stand_in(results)
    )


def rows(results: Results) -> list[Row]:
    """Return a row for each limit."""
    return [*_launcher(results), *_creates(results), *_resources(results), *_instructions(results)]


def _launcher(results: Results) -> Iterator[Row]:
    for operation in OTHERS:
        more = over(walls(results, NONE, operation), walls(results, BASE, operation))
        yield _at_most(f"{operation}: over bare runc", more, OTHERS_MS, _ms)
    more = over(walls(results, NONE), walls(results, BASE))
    yield _at_most("create that asks for no GPU: over bare runc", more, CREATE_MS, _ms)


def _creates(results: Results) -> Iterator[Row]:
    for case, limit in ((EIGHT, EIGHT_RATIO), (EIGHT_ALL, ALL_RATIO)):
        name = case if case == EIGHT_ALL else f"{case}, compute,utility"
        of_runc = create_ratio(results, case)
        of_edits = create_ratio(results, case, f"runc, edits of {case}")
        yield _at_most(f"create, {name}, warm: of bare runc", of_runc, limit, _times)
        yield _at_most("… of bare runc with the same edits", of_edits, EDITS_RATIO, _times)
    of_no_hook = create_ratio(results, EIGHT_ALL, f"runc, edits of {EIGHT_ALL}, no hook")
    yield _at_most("… and no hook", of_no_hook, NO_HOOK_RATIO, _times)
    best = _best_other(results)
    if best is not None:
        name, of_other = best
        yield _at_most(f"… of the same by {name}", of_other, OTHER_RATIO, _times)
    hook = [sample[0] for sample in results["hooks"][f"runc, edits of {EIGHT_ALL}"]]
    python = [sample[0] for sample in results["programs"]["python"]]
    yield _at_most(f"hook, {EIGHT_ALL}: of a bare Python", ratio(hook, python), HOOK_WALL, _times)
    eight = create_ratio(results, EIGHT, host="cdi")
    many = create_ratio(results, MANY, host="MIG, cdi")
    what = f"create, {MANY}, cdi: of the ratio of 8 GPUs"
    yield _at_most(what, many / eight, MANY_RATIO, _times)
    initialisations = results["counts"]["questions"]
    yield Row(
        "create, 8 GPUs, cold: NVML initialisations",
        "1",
        str(initialisations),
        initialisations == 1,
    )
    cold = create_ratio(results, f"{EIGHT}, cold", EIGHT)
    yield _at_most("… of the warm one", cold, COLD_RATIO, _times)


def _best_other(results: Results) -> tuple[str, float] | None:
    """Return the other runtime whose create is the quickest, and the ratio of ours to that.

    Each mode of another toolkit is a runtime with a name of its own. None without any.
    """
    ending = f", {EIGHT_ALL}"
    prefix = "jit-cdi: "
    names = [
        name.removeprefix(prefix).removesuffix(ending)
        for name in results["lives"]
        if name.startswith(prefix) and name.endswith(ending)
    ]
    others = [name for name in names if not name.startswith("runc")]
    ratios = {name: create_ratio(results, EIGHT_ALL, f"{name}{ending}") for name in others}
    name = max(ratios, key=lambda name: ratios[name], default=None)
    return None if name is None else (name, ratios[name])


def _resources(results: Results) -> Iterator[Row]:
    samples = [
        *(sample for name in results["programs"] if name not in ("true", "hello", "python")
          for sample in results["programs"][name]),
        *(sample for hooks in results["hooks"].values() for sample in hooks),
    ]  # fmt: skip
    peak = max(sample[2] for sample in samples) / 1024
    yield _at_most("peak memory of what is ours", peak, PEAK_MIB, lambda mib: f"{mib:.1f} MiB")


def _instructions(results: Results) -> Iterator[Row]:
    counts = results["counts"]
    none = "create, no GPU"
    floor = counts["floor"]
    limits = {
        "state": ("launcher, state: instructions", LAUNCHER_SHARE),
        none: (
            f"launcher, {none}: instructions",
            LAUNCHER_SHARE + A_BYTE * counts[f"bytes, {none}"] / floor,
        ),
        "create, 8 GPUs": ("create, 8 GPUs, warm, up to the exec: instructions", SHIM_SHARE),
        "hook": ("hook, up to its first operation: instructions", HOOK_SHARE),
    }
    for name, (what, limit) in limits.items():
        yield _at_most(what, counts[name] / floor, limit, _floors)


def _at_most(what: str, value: float, limit: float, text: Callable[[float], str]) -> Row:
    return Row(what, text(limit), text(value), value <= limit)


def _ms(value: float) -> str:
    return f"{value:.2f} ms"


def _times(value: float) -> str:
    return f"{value:.2f} x"


def _floors(value: float) -> str:
    return f"{value:.3f} x a bare Python"
