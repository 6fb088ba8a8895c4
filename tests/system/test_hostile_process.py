# SPDX-License-Identifier: Apache-2.0
"""EXE-01 and EXE-04: a process of the same user cannot look into the hook while it works.

A container that shares the hook's process namespace has such. All have uid 0 and no capability
here: a hook that has given up its own before it says so can be read by anybody of its uid.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system("setpriv"), pytest.mark.catalogue("EXE-01", "EXE-04")]
HOOK = Path(__file__).parents[2] / ".venv" / "bin" / "gpu-cdi-hook"
BARE = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"]
START_PYTHON = "/usr/bin/python3"
WAITS = "import os; os.fork(); os.read(0, 1)"
EVERYTHING = "root cwd exe environ mem maps ptrace"
LOOK = """
import ctypes, os, sys
pid = int(sys.argv[1])
seen = []
for name in ("root", "cwd", "exe"):
    try:
        os.readlink(f"/proc/{pid}/{name}")
        seen.append(name)
    except PermissionError:
        pass
for name in ("environ", "mem", "maps"):
    try:
        open(f"/proc/{pid}/{name}", "rb").close()
        seen.append(name)
    except PermissionError:
        pass
PTRACE_ATTACH = 16
if ctypes.CDLL(None).ptrace(PTRACE_ATTACH, pid, 0, 0) == 0:
    seen.append("ptrace")
print(*seen)
"""


def children(pid: int) -> list[int]:
    """Return *pid* and its children."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, found)]


def is_waiting(pids: list[int]) -> bool:
    """Return whether all that there are sleep."""
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
    return set(states) == {"S"}


def what_is_seen(*command: str) -> list[str]:
    """Start *command*, which waits for its input; return what is seen of it and its children."""
    with subprocess.Popen([*BARE, *command], stdin=subprocess.PIPE) as victim:
        try:
            end = time.monotonic() + 60
            while not is_waiting(children(victim.pid)):
                assert time.monotonic() < end
                time.sleep(0.02)
            # The hook's start is over where it waits for its input: look, then look again.
            time.sleep(0.2)
            return [
                subprocess.run(
                    [*BARE, START_PYTHON, "-I", "-c", LOOK, str(pid)],
                    capture_output=True, text=True, check=True,
                ).stdout.strip()
                for pid in children(victim.pid)
            ]  # fmt: skip
        finally:
            victim.kill()


def test_exe_01_nobody_else_looks_into_the_hook() -> None:
    """Its child, which works, is as it is."""
    assert set(what_is_seen(str(HOOK), "update-container", "--mask-params")) == {""}


def test_exe_01_control_an_ordinary_program_is_open() -> None:
    """Where the kernel forbids it to all, the test above proves nothing."""
    assert what_is_seen(START_PYTHON, "-I", "-c", WAITS) == [EVERYTHING, EVERYTHING]
