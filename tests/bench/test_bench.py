# SPDX-License-Identifier: Apache-2.0
"""The benchmark: its arithmetic, on fixed samples, and one short run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from bench import cases, chart, measure, page, targets
from bench.figures import Summary, over, quantile, ratio
from containers import machine

TREE = Path(__file__).parents[2]
PAGE = TREE / "docs" / "development" / "performance.md"
DEADLINE_S = 60.0
SVG = "{http://www.w3.org/2000/svg}"
FEW = "^jit-cdi: (runc|no GPU|1 GPU)$"


def test_a_quantile_lies_between_its_neighbours() -> None:
    """The order of the samples does not matter."""
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([10.0, 30.0, 20.0], 1.0) == 30.0
    assert quantile([7.0], 0.1) == 7.0


def test_a_summary_is_not_moved_by_one_sample_far_off() -> None:
    """Outliers are common on test machines."""
    summary = Summary.of([1.0, 2.0, 3.0, 4.0, 1000.0])
    assert (summary.median, summary.count) == (3.0, 5)
    assert summary.low == pytest.approx(1.4)
    assert summary.high == pytest.approx(601.6)


def test_differences_are_those_within_a_round() -> None:
    """The medians are equal in this example."""
    assert over([2.0, 12.0, 22.0], [1.0, 11.0, 30.0]) == 1.0
    with pytest.raises(ValueError, match="longer"):
        over([1.0], [1.0, 2.0])


def test_what_is_in_both_is_in_no_ratio() -> None:
    """The time of the stand-in hook for /proc/driver is subtracted."""
    assert ratio([30.0, 50.0, 40.0], [20.0]) == 2.0
    assert ratio([42.0], [22.0], both=2.0) == 2.0


def _sample(wall: float) -> list[float]:
    return [wall, wall, 8 * 1024]


def _results(**creates: float) -> dict[str, Any]:
    """Return the results of a run: 5 ms for each operation, 20 ms or *creates* for a create."""
    lives = {
        case.full_name: {
            operation: [_sample(creates.get(case.full_name, 20.0) if operation == "create" else 5)]
            for operation in cases.OPERATIONS
        }
        for case in cases.CASES
    }
    names = ("hello", "python", "state", "create, 8 GPUs", "create, 8 GPUs, all capabilities")
    edits = [case.name for case in cases.JIT if case.edits == "same"]
    floor = 1_000_000
    counts = {"floor": floor, "state": 20_000, "create, no GPU": 25_000, "hook": floor}
    return {
        "lives": lives,
        "programs": {name: [_sample(1)] for name in names},
        "hooks": {name: [_sample(2)] for name in edits},
        "counts": {
            **counts, "create, 8 GPUs": 2 * floor, "bytes, create, no GPU": 1000, "questions": 1
        },
        "engines": {"docker": {"runc": [_sample(100)]}, "containerd": None},
        "reps": 1, "first": False, "load": [[0.5, 0, 0], [1.5, 0, 0]],
    }  # fmt: skip


def _missed(results: dict[str, Any]) -> set[str]:
    return {row.what for row in targets.rows(results) if not row.is_met}


def test_what_is_as_quick_as_runc_meets_everything() -> None:
    """A run without any overhead."""
    assert _missed(_results()) == set()


def test_the_best_of_other_runtimes_is_the_one_to_beat() -> None:
    """Each mode of another toolkit is a separate runtime in the run."""
    results = _results()
    for name, wall in (("slow", 90.0), ("quick", 39.0)):
        lives = {operation: [_sample(wall)] for operation in cases.OPERATIONS}
        results["lives"][f"jit-cdi: {name}, 8 GPUs, all capabilities"] = lives
    assert _missed(results) == {"… of the same by quick"}
    results["lives"]["jit-cdi: quick, 8 GPUs, all capabilities"]["create"] = [_sample(41.0)]
    assert _missed(results) == set()


@pytest.mark.parametrize(
    ("creates", "what"),
    [
        ({"jit-cdi: no GPU": 21.6}, "create that asks for no GPU: over bare runc"),
        # The stand-in takes 2 ms: 42.4 of 18 is not 44.4 of 20.
        (
            {
                "jit-cdi: runc, without the stand-in": 18.0,
                "jit-cdi: 8 GPUs": 43.0,
                "jit-cdi: runc, edits of 8 GPUs": 40.0,
            },
            "create, 8 GPUs, compute,utility, warm: of bare runc",
        ),
        (
            {"MIG, cdi: 56 MIG devices": 23.1},
            "create, 56 MIG devices, cdi: of the ratio of 8 GPUs",
        ),
        ({"jit-cdi: 8 GPUs, cold": 52.1}, "… of the warm one"),
        (
            {"jit-cdi: runc, edits of 8 GPUs, all capabilities, no hook": 13.0},
            "… and no hook",
        ),
    ],
)
def test_what_is_slower_is_missed(creates: dict[str, float], what: str) -> None:
    """One target each."""
    assert _missed(_results(**creates)) == {what}


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("questions", 2, "create, 8 GPUs, cold: NVML initialisations"),
        ("state", 20_001, "launcher, state: instructions"),
        ("create, no GPU", 26_001, "launcher, create, no GPU: instructions"),
        ("create, 8 GPUs", 3_000_001, "create, 8 GPUs, warm, up to the exec: instructions"),
    ],
)
def test_what_counts_more_is_missed(name: str, value: int, what: str) -> None:
    """The budgets of the start path."""
    results = _results()
    results["counts"][name] = value
    assert _missed(results) == {what}


def test_memory_is_that_of_hooks_too() -> None:
    """Hooks may take more memory than the runtime."""
    results = _results()
    next(iter(results["hooks"].values())).append([1.0, 1.0, 16 * 1024 + 1])
    assert _missed(results) == {"peak memory of what is ours"}


def test_the_page_has_every_target_and_every_case() -> None:
    """The committed page was written by this code."""
    results = _results()
    text, committed_page = page.page(results, "make bench"), PAGE.read_text()
    for row in targets.rows(results):
        assert f"| {row.what} | {row.limit} | {row.measured} | met |" in text
        assert f"\n| {row.what} | " in committed_page
    for case in cases.CASES:
        assert f"\n| {case.full_name} | " in text
        assert f"\n| {case.full_name} | " in committed_page
    assert "| containerd is not installed here |" in text


def test_the_chart_shows_each_case_with_its_ratio_to_runc() -> None:
    """The longest bar is the slowest case, and each label has the ratio."""
    text = chart.chart(_results(**{f"jit-cdi: {cases.EIGHT}": 50.0}))
    document = ET.fromstring(text)
    bars = [float(bar.get("width", "")) for bar in document.iter(f"{SVG}rect")][1:]
    labels = [label.text for label in document.iter(f"{SVG}text")][1:]
    assert bars[3] == max(bars) == pytest.approx(2.5 * bars[0], rel=0.01)
    assert labels[6:8] == ["8 GPUs", "50 ms = 2.50 of runc"]


def test_another_runtime_is_asked_for_the_same_containers() -> None:
    """Except the cold cases: the cache of another runtime is unknown."""
    groups = cases.with_others(cases.GROUPS, {"x": "/x"})
    others = [case for group in groups for case in group.cases if case.program == "/x"]
    assert {case.full_name for case in others} >= {"jit-cdi: x, no GPU", "cdi: x, 8 GPUs"}
    assert not any(case.is_cold for case in others)
    (beside,) = (
        group for group in groups if any(case.name == "x, no GPU" for case in group.cases)
    )
    assert "jit-cdi: runc" in [case.full_name for case in beside.cases]


def test_samples_of_one_number_are_from_neighbours() -> None:
    """Differences are those of a round: no other case is measured between its cases."""
    groups = [
        cases.Group((cases.JIT[0], cases.JIT[2]), rounds=3),
        cases.Group((cases.JIT[3],), rounds=2),
    ]
    guest = NumberingGuest()
    results = measure.measure({"jit-cdi": guest, cases.BARE: guest}, groups, 4)  # type: ignore[dict-item]
    numbers = {name: samples["create"] for name, samples in results["lives"].items()}
    assert [len(samples) for samples in numbers.values()] == [12, 12, 8]
    assert len(results["programs"]["python"]) == 4 * cases.BARE_TIMES
    differences = [a - b for a, b in zip(numbers["jit-cdi: runc"], numbers["jit-cdi: no GPU"])]
    assert {*differences} == {1, -1}


class NumberingGuest:
    """A guest whose samples are the numbers of the measurements."""

    def __init__(self) -> None:
        self.count = 0

    def ask(self, name: str, /, **_: Any) -> dict[str, int]:
        """Return the next number as the sample of each operation, or of a program."""
        self.count += 1
        return dict.fromkeys(("python",) if name == "programs" else cases.OPERATIONS, self.count)


@pytest.mark.parametrize("word", ["crun", "=/bin/true", "x=", "x=/etc/passwd", "ours=/bin/true"])
def test_a_runtime_that_cannot_be_one_is_refused(word: str) -> None:
    """Before anything is measured."""
    with pytest.raises(argparse.ArgumentTypeError, match='is not a new name, "=" and a program'):
        measure.named(word)
    assert measure.named("x=/bin/true") == ("x", "/bin/true")


def _command(out: Path) -> list[str]:
    program = str(TREE / "tests" / "bench" / "measure.py")
    return [sys.executable, program, "--reps", "1", "--only", FEW, "--out", str(out)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TREE / "tests")}


@pytest.mark.system("runc", "gcc", "make")
def test_a_run_has_a_sample_of_each_operation_and_leaves_nothing(tmp_path: Path) -> None:
    """Our runtime is installed on the simulated host, without traces on the machine."""
    before = machine.of_machine()
    out = tmp_path / "bench.json"
    done = subprocess.run(
        _command(out), env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lives = json.loads(out.read_text())["lives"]
    assert list(lives) == ["jit-cdi: runc", "jit-cdi: no GPU", "jit-cdi: 1 GPU"]
    for case in cases.JIT:
        if case.full_name in lives:
            assert list(lives[case.full_name]) == list(cases.OPERATIONS)
            for samples in lives[case.full_name].values():
                assert len(samples) == cases.rounds_of("jit-cdi", case.name)
                assert all(wall > 0 and peak > 0 for wall, _, peak in samples)
    assert machine.differences(before, machine.of_machine) == []


@pytest.mark.system("runc", "gcc", "make")
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    """A run takes minutes: users interrupt it."""
    before = machine.of_machine()
    run = subprocess.Popen(_command(tmp_path / "bench.json"), env=ENVIRONMENT)
    try:
        end = time.monotonic() + DEADLINE_S
        while not (children := _children(run.pid)):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    while any(Path("/proc", child).exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert machine.differences(before, machine.of_machine, lost=False) == []


def _children(pid: int) -> list[str]:
    """Return the PIDs of the simulated hosts that *pid* has started."""
    children = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path("/proc", child, "cmdline").read_bytes().split(b"\0")
        if any(word.endswith(b"simhost.py") for word in words[:2]):
            children.append(child)
    return children
