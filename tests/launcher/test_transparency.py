# SPDX-License-Identifier: Apache-2.0
"""The runtime role is transparent: the low-level runtime sees exactly what the engine passed.

Each situation is recorded twice, started directly and through us, and the records are compared:
by the launcher alone for what it passes through, by launcher and shim for a create.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launcher.bundles import companion_text, write_bundle, write_companion

if TYPE_CHECKING:
    from launcher.conftest import Bench, Outcome, Record

# Beside the ids of the two processes, what the kernel counts or the address space differ.
STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Threads"),
    *("Cpus_allowed_list", "Mems_allowed_list", "FDSize"),
)
SITUATIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "engine-descriptors": ("engine-fds",),
    "odd-environment": ("odd-environment",),
    "all-signals-ignored": ("ignore-signals",),
    "pipe-ignored": ("ignore-pipe",),
    "some-signals-blocked": ("block-some",),
    "all-signals-blocked": ("block-all",),
    "odd-umask": ("umask-odd",),
    "odd-limits": ("odd-limits",),
    "no-stdin": ("no-stdin",),
    "no-stdio": ("no-stdio",),
    "full-stdout": ("full-stdout",),
    "death-signal-and-session": ("own-session", "death-signal"),
    "everything": (
        *("engine-fds", "odd-environment", "ignore-signals", "block-some", "umask-odd"),
        *("odd-limits", "own-session", "death-signal"),
    ),
}
COMMANDS: dict[str, list[str]] = {
    "start": ["--root", "/r", "--log", "/dev/null", "--log-format", "json", "start", "c1"],
    "state": ["state", "c1"],
    "kill": ["kill", "--all", "c1", "9"],
    "delete": ["--systemd-cgroup", "delete", "--force", "c1"],
    "exec": ["exec", "--preserve-fds", "3", "--console-socket", "/c", "-d", "c1", "sh", ""],
    "features": ["features"],
    "version": ["--version"],
    "nothing": [],
}
CREATING = ("create", "passed create", "run", "passed run")
# What a container that asks for no GPU looks like to the shim.
CONFIG = {"ociVersion": "1.0.2", "process": {"args": ["/init"], "env": ["A=1"]}, "root": {}}


def descriptors(record: Record, pid: int) -> dict[int, tuple[int, int, str]]:
    """Return the descriptors; pipes and sockets, new in each start, without their numbers."""
    return {
        number: (position, flags, re.sub(r":\[\d+\]", "", target).replace(f"/{pid}/", "/self/"))
        for number, (position, flags, target) in record.descriptors.items()
    }


def seen(outcome: Outcome) -> dict[str, Any]:
    """Return all of a record that must not depend on how the program was started."""
    assert outcome.returncode == 0, outcome.stderr
    record = outcome.record
    process = record.process
    # The same pid that the engine started: nobody forked in between.
    assert process.pop("pid") == outcome.pid
    assert process.pop("ppid") == os.getpid()
    own = {name: process.pop(name) == outcome.pid for name in ("pgid", "sid")}
    status = {name: record.status[name] for name in STATUS}
    return {
        "who": outcome.who,
        "arguments": record.arguments,
        "environment": record.environment,
        "descriptors": descriptors(record, outcome.pid),
        "limits": record.parts["limits"],
        "directory": record.parts["cwd"],
        "status": status,
        "leads its own": own,
        "death signal": process,
    }


@dataclass
class Way:
    """One way through us: which launcher, and the command lines that take it.

    With *own_run* its files in /run do not stay on this machine.
    """

    launcher: str
    arguments: list[str]
    own_run: bool = False


def way(name: str, bench: Bench, request: pytest.FixtureRequest) -> Way:
    """Return the way *name*: a pass-through command, or one that creates.

    That is `create` or `run` through the shim, or "passed" by the launcher.
    """
    plain = str(bench.workshop.build("plain") / "gpu-container-runtime")
    if name not in CREATING:
        return Way(plain, COMMANDS[name])
    bundle = write_bundle(bench, json.dumps(CONFIG))
    subcommand = name.rpartition(" ")[2]
    arguments = [subcommand, "--bundle", str(bundle), "--preserve-fds", "3", "c1"]
    if name.startswith("passed "):
        write_companion(bench, companion_text(None, "runc"))
        return Way(plain, arguments)
    real: Path = request.getfixturevalue("real")
    return Way(str(real / "gpu-container-runtime"), arguments, own_run=os.geteuid() == 0)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", ["start", "exec", "create", "passed create", "run"])
@pytest.mark.parametrize("locale", ["none", "C", "set"])
def test_low_level_runtime_sees_what_the_engine_gave(
    name: str, situation: str, locale: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """Engines pass sockets, pipes, masks and limits on to the container through us."""
    through = way(name, bench, request)
    env = bench.environment(HOME="/root", XDG_RUNTIME_DIR="/run/user/0", NOTIFY_SOCKET="/run/n")
    if locale == "C":
        env["LC_ALL"] = "C"
    elif locale == "set":
        env |= {"LC_CTYPE": "C", "LANG": "en_GB.UTF-8"}
    habits = SITUATIONS[situation]
    how: dict[str, Any] = {"habits": habits, "env": env, "own_run": through.own_run}
    runc = str(bench.path("lowlevel/runc"))
    direct = seen(bench.start([runc, *through.arguments], **how))
    assert seen(bench.start([through.launcher, *through.arguments], **how)) == direct


@pytest.mark.parametrize("name", [*COMMANDS, *CREATING])
def test_every_subcommand_is_transparent(
    name: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """Everything awkward at once, for each kind of call."""
    through = way(name, bench, request)
    how: dict[str, Any] = {"habits": SITUATIONS["everything"], "own_run": through.own_run}
    runc = str(bench.path("lowlevel/runc"))
    direct = seen(bench.start([runc, *through.arguments], **how))
    assert seen(bench.start([through.launcher, *through.arguments], **how)) == direct


@pytest.mark.skipif(os.geteuid() != 0, reason="a private /run needs root")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_slow_path_is_transparent_too(
    situation: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """A config that is not compiled yet is read by a child, which must leave no trace."""
    through = way("create", bench, request)
    path = bench.path("other/config.toml")
    path.write_text('[nvidia-container-runtime]\nruntimes = ["crun"]\n')
    env = bench.environment(GPURUNTIME_CONFIG=str(path))
    habits = SITUATIONS[situation]
    crun = str(bench.path("lowlevel/crun"))
    ours_line = [through.launcher, *through.arguments]
    direct = seen(bench.start([crun, *through.arguments], habits=habits, env=env, own_run=True))
    # Its own /run, or the compiled config would stay on this machine.
    ours = seen(bench.start(ours_line, habits=habits, env=env, own_run=True))
    assert ours == direct


@pytest.mark.parametrize("name", ["start", "create", "passed create", "run"])
def test_empty_environment_stays_empty(
    name: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """Nothing is added, not even what Python's locale coercion would add."""
    through = way(name, bench, request)
    runc = bench.path("lowlevel/runc")
    if name in ("create", "run"):
        # Without PATH the real launcher finds the machine's own runtimes: name ours another way.
        env = {"PATH": str(runc.parent)}
    else:
        env = {}
        bench.put("standard/runc")
    outcome = bench.start([through.launcher, *through.arguments], env=env, own_run=through.own_run)
    assert outcome.record.environment == [f"{key}={value}".encode() for key, value in env.items()]


@pytest.mark.parametrize("name", ["start", "create", "passed create", "run"])
def test_deleted_directory_is_passed_on(
    name: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """An engine's working directory is none of our business."""
    through = way(name, bench, request)
    outcome = bench.start(
        [through.launcher, *through.arguments],
        habits=("deleted-directory",),
        own_run=through.own_run,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.record.parts["cwd"].endswith(b" (deleted)")


def test_control_sees_a_difference(bench: Bench) -> None:
    """The comparison notices each of the things that it is for."""
    runc = str(bench.path("lowlevel/runc"))
    plain = seen(bench.start([runc, "start"]))
    for situation, habits in SITUATIONS.items():
        if situation != "plain":
            assert seen(bench.start([runc, "start"], habits=habits)) != plain, situation
