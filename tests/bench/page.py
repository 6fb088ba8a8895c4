# SPDX-License-Identifier: Apache-2.0
"""The measurements as tables: docs/development/performance.md and the output of `make bench`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from bench.cases import BASE, EIGHT, EIGHT_ALL, NONE, OPERATIONS, rounds_of
from bench.figures import Summary
from bench.targets import Results, rows, stand_in, walls

HEAD = """# Performance

What stands between an engine and runc, measured by

    {command}

on simulated hosts with 8 GPUs and `ModifyDeviceFiles: 1`, ours as `make install` has it.
`make bench DOC=1` writes this page, and leaves all samples in `build/bench/bench.json`.
`make bench RUNTIME=NAME=PATH` measures another runtime in the same run.
`REPLAY=off` measures ours without repeated creates.

Each container has an overlay and a config.json of its own.
It is created, started, asked for its state, entered, killed and deleted.
Each container is measured after an untimed create of the same case.
A round measures cases that a limit compares directly after each other, in random order.
Each repetition has {no_gpu} rounds of runc and no GPU, {gpus} of 8 GPUs and {cdi} of cdi mode.
The other cases have one round, and the order of all rounds is random.
*Cold* means that /run/gpuruntime is emptied after the untimed create.
Times are medians of all samples in ms of wall clock time; ratios are ratios of medians.
*Over* is the median of the differences within a round.
{policy}
{reps} repetitions; load average before and after: {before:.1f}, {after:.1f}.

![The time of one create, through us and by a bare runc](start-times.svg)
"""
PROFILE = """The same create without its parts.
The columns are two containers of 8 GPUs, with different driver capabilities.

"""


def page(results: Results, command: str) -> str:
    """Return the page; *command* is the command of the measurement."""
    policy = "Everything ran ahead of the machine's other processes (SCHED_FIFO)."
    head = HEAD.format(
        command=command,
        policy=policy if results["first"] else "Other processes of the machine had their share.",
        reps=results["reps"],
        before=results["load"][0][0],
        after=results["load"][1][0],
        no_gpu=rounds_of("jit-cdi", NONE),
        gpus=rounds_of("jit-cdi", EIGHT),
        cdi=rounds_of("cdi", EIGHT),
    )
    parts = [head, "## What it must reach", _targets(results), "## Containers", _lives(results)]
    parts += ["## What is left in a warm create", PROFILE + _profile(results)]
    parts += ["## Without a container", _programs(results), "## Instructions", _counts(results)]
    parts += ["## Engines", _engines(results)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _targets(results: Results) -> str:
    lines = [
        (row.what, row.limit, row.measured, "met" if row.is_met else "**missed**")
        for row in rows(results)
    ]
    return table(("operation", "at most", "measured", ""), lines)


def _lives(results: Results) -> str:
    lines = []
    for name, operations in results["lives"].items():
        host, _, case = name.rpartition(": ")
        create = Summary.of(walls(results, case, host=host))
        base = statistics.median(walls(results, BASE, host=host))
        others = [
            f"{statistics.median(walls(results, case, operation, host)):.1f}"
            for operation in (*OPERATIONS[1:], "life")
        ]
        cpu = statistics.median(sample[1] for sample in operations["create"])
        peak = max(sample[2] for sample in operations["create"]) / 1024
        lines.append(
            (
                *(name, f"{create.median:.1f} ({create.low:.1f} to {create.high:.1f})"),
                *(f"{create.median / base:.2f}", f"{cpu:.1f}", f"{peak:.0f}", *others),
            )
        )
    names = ("host: container", "create (10 % to 90 %)", "of runc's", "CPU", "MiB")
    note = (
        f"\n\nThe stand-in, a hook that shows /proc/driver as a kernel would, takes "
        f"{stand_in(results):.1f} ms of each create but one; the targets' ratios leave it out.\n"
        "MiB is the peak of one process, runc's own included. A life is create, start, kill and "
        "delete."
    )
    return table((*names, *OPERATIONS[1:], "life"), lines) + note


def _profile(results: Results) -> str:
    parts: dict[str, list[str]] = {}
    for case in (EIGHT, EIGHT_ALL):
        edits = f"runc, edits of {case}"
        runc, no_hook, same, ours = (
            statistics.median(walls(results, name))
            for name in (BASE, f"{edits}, no hook", edits, case)
        )
        hook = statistics.median(sample[0] for sample in results["hooks"][edits])
        front = statistics.median(
            sample[0] for sample in results["programs"][f"create, {case}"]
        ) - statistics.median(sample[0] for sample in results["programs"]["hello"])
        for part, value in {
            "runc, no edits": runc,
            "runc: mounts and nodes": no_hook - runc,
            "runc with our hook": same - no_hook,
            "… of which the process of the hook": hook,
            "in front of runc": ours - same,
            "… measured without a container": front,
            "together": ours,
        }.items():
            parts.setdefault(part, []).append(f"{value:.1f}")
    return table(("part", EIGHT, "all capabilities"), [(part, *v) for part, v in parts.items()])


def _programs(results: Results) -> str:
    lines = []
    for name, samples in results["programs"].items():
        wall = Summary.of([sample[0] for sample in samples])
        peak = max(sample[2] for sample in samples) / 1024
        lines.append(
            (name, f"{wall.median:.2f} ({wall.low:.2f} to {wall.high:.2f})", f"{peak:.1f}")
        )
    note = (
        "\n\n`hello` is a static program in C, `python` is `python3 -I -S -B -X utf8 -c pass`; "
        "the others are our runtime, which becomes `hello`. The term of the targets that is a "
        "share of a Go program's start is not used: no Go is needed here, and 1.2 ms is stricter."
    )
    return table(("program", "wall (10 % to 90 %)", "peak MiB"), lines) + note


def _counts(results: Results) -> str:
    counts = results["counts"]
    lines = [
        (name, f"{count:,}", f"{count / counts['floor']:.3f}")
        for name, count in counts.items()
        if name != "questions" and not name.startswith("bytes")
    ]
    note = (
        "\n\nBy callgrind, up to the exec of the low-level runtime; of a create that the launcher "
        "does not do alone, of Python. `floor` is `python3 -I -S -B -X utf8 -c pass`."
    )
    return table(("what", "instructions", "of the floor"), lines) + note


def _engines(results: Results) -> str:
    lines = []
    for engine, cases in results["engines"].items():
        if cases is None:
            lines.append((f"{engine} is not installed here", "", "", ""))
            continue
        base = statistics.median(sample[0] for sample in cases[BASE])
        for name, samples in cases.items():
            wall = Summary.of([sample[0] for sample in samples])
            shown = f"{wall.median:.0f} ({wall.low:.0f} to {wall.high:.0f})"
            lines.append(
                (
                    f"{engine}: {name}",
                    shown,
                    f"{wall.median / base:.2f}",
                    f"{wall.median - base:+.0f}",
                )
            )
    note = (
        "\n\n`docker run --rm --network=none` and `ctr run --rm` of a program that does nothing."
    )
    return table(("container", "wall (10 % to 90 %)", "of runc's", "over"), lines) + note


def table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""

    def row_of(cells: Sequence[str]) -> Iterator[str]:
        yield f"| {' | '.join(cells)} |"

    parts = [*row_of(names), f"|{'---|' * len(names)}"]
    for line in lines:
        parts += row_of(line)
    return "\n".join(parts)
