# SPDX-License-Identifier: Apache-2.0
"""The measurements: simulated hosts, containers, runtimes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

OPERATIONS = ("create", "start", "state", "exec", "kill", "delete")
# The operations of a container that runs once.
LIFE = ("create", "start", "kill", "delete")
RUNC, OURS = "runc", "ours"
# How the driver files get into the container (views.py).
WAYS = ("files", "directory", "directory of mounts", "nothing")
# The host on which programs are measured without containers. Its low-level runtime is a program
# that does nothing.
BARE = "no runtime"
BARE_TIMES = 3
LOWLEVEL = "/run/gpuruntime-bench/lowlevel"


@dataclass(frozen=True)
class Host:
    """A simulated host with its own config.toml: the cache in /run fits one configuration."""

    name: str
    options: tuple[str, ...] = ()
    config: str = ""


MIG = ("--mig", "all:7")
CDI = 'mode = "cdi"'
HOSTS = (
    Host("jit-cdi"),
    Host("cdi", config=CDI),
    Host("MIG, jit-cdi", MIG),
    Host("MIG, cdi", MIG, CDI),
    Host(BARE, config=f'runtimes = ["{LOWLEVEL}"]'),
)


@dataclass(frozen=True)
class Case:
    """A container on which each of OPERATIONS is measured.

    *program* is RUNC, OURS or a path. *gpus* are the requested GPUs, None without a request.
    *is_cold*: /run/gpuruntime is empty; otherwise the same create has just been done. *edits*:
    the config.json already has our edits; "no hook": without our hook. *has_stand_in*: the hook of
    the simulated host runs, which mounts /proc/driver as a kernel driver shows it.
    """

    host: str
    name: str
    program: str
    gpus: str | None = None
    capabilities: str | None = None
    is_cold: bool = False
    edits: str | None = None
    has_stand_in: bool = True

    @property
    def full_name(self) -> str:
        """Return the host and the name."""
        return f"{self.host}: {self.name}"

    @property
    def environment(self) -> list[str]:
        """Return the variables by which the container requests GPUs."""
        variables = {
            "NVIDIA_VISIBLE_DEVICES": self.gpus,
            "NVIDIA_DRIVER_CAPABILITIES": self.capabilities,
        }
        return [f"{name}={value}" for name, value in variables.items() if value is not None]


@dataclass(frozen=True)
class Group:
    """Cases that a limit compares, measured directly after each other.

    A repetition has *rounds* of them; a round has each of *cases* once, in random order.
    """

    cases: tuple[Case, ...]
    rounds: int = 1


BASE = "runc"
NONE, EIGHT, EIGHT_ALL = "no GPU", "8 GPUs", "8 GPUs, all capabilities"
# The standard deviation of a single create is 8 ms. The first group has the smallest difference.
JIT_GROUPS = (
    Group(
        (
            Case("jit-cdi", BASE, RUNC),
            Case("jit-cdi", "runc, without the stand-in", RUNC, has_stand_in=False),
            Case("jit-cdi", NONE, OURS),
        ),
        rounds=7,
    ),
    Group((Case("jit-cdi", "1 GPU", OURS, "0"),)),
    Group(
        (
            Case("jit-cdi", EIGHT, OURS, "all"),
            Case("jit-cdi", f"runc, edits of {EIGHT}", RUNC, "all", edits="same"),
            Case("jit-cdi", f"runc, edits of {EIGHT}, no hook", RUNC, "all", edits="no hook"),
            Case("jit-cdi", f"{EIGHT}, cold", OURS, "all", is_cold=True),
        ),
        rounds=3,
    ),
    Group(
        (
            Case("jit-cdi", EIGHT_ALL, OURS, "all", "all"),
            Case("jit-cdi", f"runc, edits of {EIGHT_ALL}", RUNC, "all", "all", edits="same"),
            Case(
                *("jit-cdi", f"runc, edits of {EIGHT_ALL}, no hook", RUNC, "all", "all"),
                edits="no hook",
            ),
        ),
        rounds=3,
    ),
    Group((Case("jit-cdi", f"{EIGHT_ALL}, cold", OURS, "all", "all", is_cold=True),)),
)
JIT = tuple(case for group in JIT_GROUPS for case in group.cases)


def _others(host: str, name: str, rounds: int = 1) -> tuple[Group, ...]:
    return (
        Group((Case(host, BASE, RUNC), Case(host, name, OURS, "all")), rounds),
        Group((Case(host, f"runc, edits of {name}", RUNC, "all", edits="same"),)),
        Group((Case(host, f"{name}, cold", OURS, "all", is_cold=True),)),
    )


MANY = "56 MIG devices"
GROUPS = (
    *JIT_GROUPS,
    *_others("cdi", EIGHT, rounds=3),
    *_others("MIG, jit-cdi", MANY),
    *_others("MIG, cdi", MANY, rounds=3),
)
CASES = tuple(case for group in GROUPS for case in group.cases)


def rounds_of(host: str, name: str) -> int:
    """Return how often the case *name* of *host* is measured in one repetition."""
    return next(
        group.rounds
        for group in GROUPS
        for case in group.cases
        if (case.host, case.name) == (host, name)
    )


def with_others(groups: Iterable[Group], runtimes: dict[str, str]) -> list[Group]:
    """Return *groups*, with the cases of OURS again for each of *runtimes*, name → path."""

    def others(case: Case) -> Iterator[Case]:
        # The cache of another runtime is unknown: it has no cold cases.
        if case.program == OURS and not case.is_cold:
            for name, path in runtimes.items():
                yield replace(case, name=f"{name}, {case.name}", program=path)

    return [
        replace(
            group,
            cases=(*group.cases, *(other for case in group.cases for other in others(case))),
        )
        for group in groups
    ]


def matching(groups: Iterable[Group], pattern: re.Pattern[str]) -> list[Group]:
    """Return *groups* with those of their cases whose names *pattern* is in; none is empty."""
    selected = [
        replace(group, cases=tuple(c for c in group.cases if pattern.search(c.full_name)))
        for group in groups
    ]
    return [group for group in selected if group.cases]
