# SPDX-License-Identifier: Apache-2.0
"""Measure what we cost between an engine and runc: `make bench`, or this with --help.

Simulated hosts with 8 GPUs, each with our runtime installed; on them containers, created, started,
asked for, entered, killed and deleted in random order, by runc and by us.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import cases, chart, page
from bench.figures import Summary, over

TREE = Path(__file__).resolve().parents[2]
BUILD = TREE / "build" / "bench"
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
WARM_UP = 2
SEED = 1
CPU = "/sys/fs/cgroup/cpu"
Results = dict[str, Any]


class Guest:
    """A simulated host that answers (inside.py)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, name: str, /, **arguments: Any) -> Any:
        """Return the answer to *name*; exit if the host has ended, which prints the reason."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"bench: the simulated host ended, status {self.process.wait()}")
        return json.loads(line)


def build() -> list[str]:
    """Compile what is small and static; return the paths."""
    BUILD.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in ("launch", "hello"):
        source = Path(__file__).with_name(f"{name}.c")
        paths.append(str(BUILD / name))
        words = [
            "gcc",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-static",
            "-o",
            paths[-1],
            str(source),
        ]
        subprocess.run(words, check=True)
    return paths


@contextmanager
def guest(
    host: cases.Host, programs: list[str], *, is_first: bool = False, replays: bool = True
) -> Iterator[Guest]:
    """Run *host* while in the context.

    *is_first*: ahead of the machine's other processes. Without *replays* the launcher repeats no
    create.
    """
    tests = TREE / "tests"
    path = [str(tests), str(tests / "containers"), str(tests / "simhost")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        # That one costs something at each call.
        "SIMHOST_WATCHED": "off",
    }
    inside = [sys.executable, str(Path(__file__).with_name("inside.py")), *programs]
    inside += [host.config, "" if replays else "-DWITHOUT_REPLAY"]
    # However this process ends: the host ends with it.
    command = ["setpriv", "--pdeathsig", "KILL"]
    command += [sys.executable, str(SIMHOST), "run", "--gpus", "8", *host.options, "--", *inside]
    if is_first and os.path.ismount(CPU):
        # A group of its own has no real time, if the kernel divides that among groups.
        script = f'mount --make-rprivate / && umount {CPU} && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", script, "sh", *command]
    process = subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    started = Guest(process)
    try:
        started.answer()
        if is_first:
            started.ask("first")
        yield started
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def measure(guests: dict[str, Guest], groups: list[cases.Group], repetitions: int) -> Results:
    """Return case → operation → samples, and those of programs without a container.

    Sample number N of each case of a group is from the same round.
    """
    lives: Results = {
        case.full_name: {operation: [] for operation in cases.OPERATIONS}
        for group in groups
        for case in group.cases
    }
    programs: dict[str, list[Any]] = defaultdict(list)
    order = random.Random(SEED)
    for repetition in range(-WARM_UP, repetitions):
        for group in turns(groups, order, has_programs=cases.BARE in guests):
            if group is None:
                _measured(guests[cases.BARE].ask("programs"), programs, repetition)
                continue
            for case in order.sample(group.cases, len(group.cases)):
                samples = guests[case.host].ask("life", **asdict(case))
                _measured(samples, lives[case.full_name], repetition)
    return {"lives": lives, "programs": programs}


def turns(
    groups: list[cases.Group], order: random.Random, *, has_programs: bool
) -> list[cases.Group | None]:
    """Return the rounds of one repetition, in the random order of *order*; None: programs."""
    rounds: list[cases.Group | None] = [group for group in groups for _ in range(group.rounds)]
    if has_programs:
        rounds += [None] * cases.BARE_TIMES
    return order.sample(rounds, len(rounds))


def _measured(new: Results, samples: Results, repetition: int) -> None:
    """Add the *new* sample of each name to *samples*, unless the *repetition* is a warm-up."""
    if repetition >= 0:
        for name, sample in new.items():
            samples[name].append(sample)


def named(word: str) -> tuple[str, str]:
    """Return name and path of NAME=PATH; raise ArgumentTypeError if it is something else."""
    name, _, path = word.partition("=")
    if not name or name in (cases.RUNC, cases.OURS) or not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f'"{word}" is not a new name, "=" and a program')
    return name, os.path.abspath(path)


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.split("\n")[0])
    parser.add_argument("--reps", type=int, default=40, help="repetitions (default 40)")
    parser.add_argument("--engine-reps", type=int, default=15, help="those of docker's containers")
    parser.add_argument(
        "--runtime", action="append", default=[], type=named, metavar="NAME=PATH", help="another"
    )
    parser.add_argument("--first", action="store_true", help="SCHED_FIFO")
    parser.add_argument(
        "--without-replay", action="store_true", help="install a launcher that repeats no create"
    )
    parser.add_argument("--views", action="store_true", help="measure docs/adr/0002 instead")
    parser.add_argument(
        "--only", default="", type=re.compile, help="pattern: the cases whose names have it"
    )
    parser.add_argument("--out", type=Path, default=BUILD / "bench.json", help="all samples")
    parser.add_argument("--doc", type=Path, help="write the page there, and a chart beside it")
    parser.add_argument("--said", default="", help="words behind make bench, for the page")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, and leave all samples below build/bench."""
    settings = options()
    programs = build()
    runtimes = dict(settings.runtime)
    groups = cases.matching(cases.with_others(cases.GROUPS, runtimes), settings.only)
    hosts = {case.host for group in groups for case in group.cases}
    results: Results = {"reps": settings.reps, "first": settings.first, "engines": {}}
    before = os.getloadavg()
    if settings.views:
        with guest(cases.HOSTS[0], programs, is_first=settings.first) as host:
            settings.out.write_text(json.dumps(views(host, settings.reps)))
        return
    with ExitStack() as stack:
        guests = {
            host.name: stack.enter_context(
                guest(host, programs, is_first=settings.first, replays=not settings.without_replay)
            )
            for host in cases.HOSTS
            if not settings.only.pattern or host.name in hosts
        }
        results |= measure(guests, groups, settings.reps)
        if not settings.only.pattern:
            results |= once(guests, settings.reps)
    if not settings.only.pattern:
        with guest(cases.HOSTS[0], programs, replays=not settings.without_replay) as host:
            results["engines"] = host.ask(
                "engines", repetitions=settings.engine_reps, runtimes=runtimes
            )
    results["load"] = [before, os.getloadavg()]
    settings.out.write_text(json.dumps(results))
    if settings.only.pattern:
        return
    text = page.page(results, f"make bench {settings.said}".strip())
    print(text, end="")
    if settings.doc:
        settings.doc.write_text(text)
        settings.doc.with_name("start-times.svg").write_text(chart.chart(results))


def views(host: Guest, repetitions: int) -> Results:
    """Measure ways to bring the driver's files (views.py), and print a table of them."""
    turns = [
        (runtime, capabilities, way)
        for runtime in ("runc", "crun")
        for capabilities in (None, "all")
        for way in cases.WAYS
    ]
    samples: dict[tuple[str, str | None, str], list[float]] = {turn: [] for turn in turns}
    order = random.Random(SEED)
    for repetition in range(-WARM_UP, repetitions):
        for turn in order.sample(turns, len(turns)):
            runtime, capabilities, way = turn
            answer = host.ask("view", runtime=runtime, capabilities=capabilities, way=way)
            if repetition >= 0:
                samples[turn].append(answer["create"][0])
    lines = []
    for (runtime, capabilities, way), walls in samples.items():
        wall = Summary.of(walls)
        more = over(walls, samples[runtime, capabilities, "files"])
        shown = f"{wall.median:.1f} ({wall.low:.1f} to {wall.high:.1f})"
        lines.append((runtime, capabilities or "compute,utility", way, shown, f"{more:+.1f}"))
    print(page.table(("runtime", "capabilities", "way", "create", "over files"), lines))
    given = {c or "compute,utility": host.ask("files", capabilities=c) for c in (None, "all")}
    print("\n".join(f"{name}: {count}" for name, count in given.items()))
    return {" ".join(map(str, turn)): walls for turn, walls in samples.items()}


def once(guests: dict[str, Guest], repetitions: int) -> Results:
    """Return what is not measured in turns with containers."""
    host = guests["jit-cdi"]
    results: Results = {"hooks": {}}
    edited = [case for case in cases.JIT if case.edits == "same"]
    for case in edited:
        samples = [host.ask("hook", **asdict(case)) for _ in range(repetitions)]
        results["hooks"][case.name] = samples
    cold = next(case for case in cases.JIT if case.is_cold)
    results["counts"] = guests[cases.BARE].ask("counts") | {
        "hook": host.ask("count_hook", **asdict(edited[0])),
        "questions": host.ask("questions", **asdict(cold)),
    }
    return results


if __name__ == "__main__":
    main()
