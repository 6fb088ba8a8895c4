# SPDX-License-Identifier: Apache-2.0
"""What is measured: on which simulated hosts, which containers, by which runtimes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

OPERATIONS = ("create", "start", "state", "exec", "kill", "delete")
# What a container costs that runs once.
LIFE = ("create", "start", "kill", "delete")
RUNC, OURS = "runc", "ours"
# How the driver's files come (views.py).
WAYS = ("files", "directory", "directory of mounts", "nothing")
# Where the programs are that are measured without containers, and the runtime that ours becomes
# there: a program that does nothing.
BARE = "no runtime"
BARE_TIMES = 3
LOWLEVEL = "/run/gpuruntime-bench/lowlevel"


@dataclass(frozen=True)
class Host:
    """A simulated host, with a config.toml of its own: what is kept in /run fits one."""

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
    """A container that is created, started, asked for, entered, killed and deleted.

    *program* is RUNC, OURS or a path. *gpus* are those it asks for, None if it asks for nothing.
    *is_cold*: nothing is kept in /run; else the same create has been done just before. *edits*:
    the config.json is the one that ours made of it; "no hook": without ours in it. *has_stand_in*:
    the hook of the simulated host runs, which shows /proc/driver as a kernel would.
    """

    host: str
    name: str
    program: str
    gpus: str | None = None
    capabilities: str | None = None
    is_cold: bool = False
    edits: str | None = None
    has_stand_in: bool = True
    # How often in a repetition: of some the difference that is looked for is small.
    times: int = 1

    @property
    def full_name(self) -> str:
        """Host and name."""
        return f"{self.host}: {self.name}"

    @property
    def environment(self) -> list[str]:
        """The variables by which the container asks."""
        asked = {
            "NVIDIA_VISIBLE_DEVICES": self.gpus,
            "NVIDIA_DRIVER_CAPABILITIES": self.capabilities,
        }
        return [f"{name}={value}" for name, value in asked.items() if value is not None]


BASE = "runc"
NONE, EIGHT, EIGHT_ALL = "no GPU", "8 GPUs", "8 GPUs, all capabilities"
JIT = (
    Case("jit-cdi", BASE, RUNC, times=3),
    Case("jit-cdi", "runc, without the stand-in", RUNC, has_stand_in=False, times=3),
    Case("jit-cdi", NONE, OURS, times=3),
    Case("jit-cdi", "1 GPU", OURS, "0"),
    Case("jit-cdi", EIGHT, OURS, "all"),
    Case("jit-cdi", f"runc, edits of {EIGHT}", RUNC, "all", edits="same"),
    Case("jit-cdi", f"runc, edits of {EIGHT}, no hook", RUNC, "all", edits="no hook"),
    Case("jit-cdi", EIGHT_ALL, OURS, "all", "all"),
    Case("jit-cdi", f"runc, edits of {EIGHT_ALL}", RUNC, "all", "all", edits="same"),
    Case("jit-cdi", f"runc, edits of {EIGHT_ALL}, no hook", RUNC, "all", "all", edits="no hook"),
    Case("jit-cdi", f"{EIGHT}, cold", OURS, "all", is_cold=True),
    Case("jit-cdi", f"{EIGHT_ALL}, cold", OURS, "all", "all", is_cold=True),
)


def _others(host: str, what: str) -> tuple[Case, ...]:
    return (
        Case(host, BASE, RUNC),
        Case(host, what, OURS, "all"),
        Case(host, f"runc, edits of {what}", RUNC, "all", edits="same"),
        Case(host, f"{what}, cold", OURS, "all", is_cold=True),
    )


MANY = "56 MIG devices"
CASES = (
    *JIT,
    *_others("cdi", EIGHT),
    *_others("MIG, jit-cdi", MANY),
    *_others("MIG, cdi", MANY),
)


def with_others(cases: Iterable[Case], runtimes: dict[str, str]) -> list[Case]:
    """Return *cases*, and those of ours once more for each of *runtimes*, name → path."""
    found = list(cases)
    for name, path in runtimes.items():
        found += [
            replace(case, name=f"{name}, {case.name}", program=path)
            for case in found
            # What another one keeps, and where, is not known here.
            if case.program == OURS and not case.is_cold
        ]
    return found
