# SPDX-License-Identifier: Apache-2.0
"""The measurements: simulated hosts, containers, runtimes."""

from __future__ import annotations

from collections.abc import Iterable
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
    # Measurements in one repetition: more for cases whose difference is small.
    times: int = 1

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


def _others(host: str, name: str) -> tuple[Case, ...]:
    return (
        Case(host, BASE, RUNC),
        Case(host, name, OURS, "all"),
        Case(host, f"runc, edits of {name}", RUNC, "all", edits="same"),
        Case(host, f"{name}, cold", OURS, "all", is_cold=True),
    )


MANY = "56 MIG devices"
CASES = (
    *JIT,
    *_others("cdi", EIGHT),
    *_others("MIG, jit-cdi", MANY),
    *_others("MIG, cdi", MANY),
)


def with_others(cases: Iterable[Case], runtimes: dict[str, str]) -> list[Case]:
    """Return *cases*, and those of OURS again for each of *runtimes*, name → path."""
    extended = list(cases)
    for name, path in runtimes.items():
        extended += [
            replace(case, name=f"{name}, {case.name}", program=path)
            for case in extended
            # The cache of another runtime is unknown: it has no cold cases.
            if case.program == OURS and not case.is_cold
        ]
    return extended
