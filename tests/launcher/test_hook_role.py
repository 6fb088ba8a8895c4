# SPDX-License-Identifier: Apache-2.0
"""The hook role under callers that mean no good: nothing of theirs reaches Python.

Python is a child of the launcher: its standard output and error are pipes of the launcher's.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Bench, Outcome

ENVIRONMENT = [b"PATH=/usr/sbin:/usr/bin:/sbin:/bin", b"LC_ALL=C.UTF-8"]
IMAGE_ENVIRONMENT = {
    "LD_PRELOAD": "./m.so",
    "LD_AUDIT": "/proc/self/cwd/a.so",
    "LD_LIBRARY_PATH": ".",
    "LD_TRACE_LOADED_OBJECTS": "1",
    "GCONV_PATH": "./gconv",
    "LOCPATH": "./loc",
    "LC_ALL": "xx_XX",
    "PYTHONHOME": ".",
    "PYTHONPATH": ".",
    "PYTHONSTARTUP": "./s.py",
    "PYTHONINSPECT": "1",
    "GPURUNTIME_CONFIG": "./config.toml",
    "XDG_CONFIG_HOME": ".",
    "PATH": "bin:.",
    "TMPDIR": "/nonexistent",
}
NOBODY = "0000000000000000"
HOSTILE = (
    *("many-fds", "no-stdin", "block-all", "ignore-signals", "umask-none"),
    *("odd-environment", "few-files", "deleted-directory"),
)
needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: system calls are not watched"
)


def assert_clean(outcome: Outcome) -> None:
    """Check everything that the hook role promises about the process it becomes."""
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.who == "python"
    record = outcome.record
    assert record.environment == ENVIRONMENT
    assert sorted(record.descriptors) == [0, 1, 2]
    assert all(record.descriptors[fd][2].startswith("pipe:") for fd in (1, 2))
    assert record.parts["cwd"] == b"/"
    assert record.status["Umask"] == "0022"
    assert record.status["SigBlk"] == NOBODY
    assert record.status["SigIgn"] == NOBODY
    assert record.process["ppid"] == outcome.pid
    assert record.process["pdeathsig"] == signal.SIGKILL
    assert record.process["pid"] == record.process["pgid"] == record.process["sid"]


def test_ordinary_caller(bench: Bench) -> None:
    """The state comes on 0, which stays what it was."""
    outcome = bench.hook("update-container")
    assert_clean(outcome)
    assert all(target.startswith("pipe:") for _, _, target in outcome.record.descriptors.values())


def test_environment_of_the_image_is_discarded(bench: Bench) -> None:
    """With runc 1.1 a createContainer hook without env starts in the image's environment."""
    assert_clean(bench.hook("update-container", env=IMAGE_ENVIRONMENT))


def test_empty_environment_is_replaced(bench: Bench) -> None:
    """The two variables do not depend on what was there."""
    assert_clean(bench.hook("update-container", env={}))


@pytest.mark.parametrize("habit", [*HOSTILE, "odd-limits", "engine-fds", "block-some"])
def test_each_hostile_habit_is_undone(habit: str, bench: Bench) -> None:
    """One at a time, so that a failure names its cause."""
    assert_clean(bench.hook("x", habits=(habit,)))


def test_all_hostile_habits_at_once_are_undone(bench: Bench) -> None:
    """1021 descriptors open although the limit is 8, all signals blocked, no directory."""
    outcome = bench.hook("x", habits=HOSTILE, env=IMAGE_ENVIRONMENT)
    assert_clean(outcome)
    assert outcome.record.descriptors[0][2] == "/dev/null"


def test_closed_standard_descriptors_become_null(bench: Bench) -> None:
    """Else the first file that the hook opens would be its standard error."""
    outcome = bench.hook("x", habits=("no-stdio",))
    assert_clean(outcome)
    _, flags, target = outcome.record.descriptors[0]
    assert (target, flags & os.O_ACCMODE) == ("/dev/null", os.O_RDWR)


def test_full_output_does_not_hang_the_start(bench: Bench) -> None:
    """The hook has nothing to say before it runs."""
    assert_clean(bench.hook("x", habits=("full-stdout",)))


def test_small_stack_is_enough(bench: Bench) -> None:
    """64 KiB: the launcher keeps nothing large on the stack."""
    assert_clean(bench.hook("x", habits=("small-stack",)))


def test_control_sees_the_hostile_habits(bench: Bench) -> None:
    """Without the launcher in between, what the tests above look for is there."""
    python = str(bench.path("python"))
    outcome = bench.start([python, "x"], habits=HOSTILE[:6], env=IMAGE_ENVIRONMENT)
    record = outcome.record
    assert b"LD_PRELOAD=./m.so" in record.environment
    assert len(record.descriptors) == 1023
    assert 0 not in record.descriptors
    assert record.status["Umask"] == "0777"
    assert record.status["SigBlk"] != NOBODY
    assert record.status["SigIgn"] != NOBODY


def trace(bench: Bench, *options: str, program: list[str], **how: object) -> tuple[str, int]:
    """Run *program* under strace; return the trace and the exit code, or skip without ptrace."""
    output = bench.path("empty/trace")
    command = ["strace", "-f", "-o", str(output), *options]
    probe = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"strace may not trace here: {probe.stderr.decode().strip()}")
    done = subprocess.run([*command, *program], capture_output=True, check=False, **how)  # type: ignore[call-overload]
    return output.read_text(errors="replace"), done.returncode


@needs_strace
def test_descriptors_are_closed_without_close_range(bench: Bench) -> None:
    """Kernels before 5.9 answer ENOSYS; RHEL 8 nodes have one."""
    record = bench.path("python.record")
    program = str(bench.workshop.build("plain") / "gpu-cdi-hook")
    caller = [str(bench.path("caller")), "many-fds", "few-files", "--", program, program]
    text, code = trace(
        bench,
        "-e",
        "trace=close_range,close",
        "-e",
        "inject=close_range:error=ENOSYS",
        program=caller,
    )
    assert code == 0
    assert re.search(r"close_range\(3, .*ENOSYS.*INJECTED", text)
    assert re.search(r"close\(1023\) += 0", text)
    data = record.read_bytes()
    listed = data[: data.index(b"@cmdline")].splitlines()[1:-1]
    assert [line.split()[0] for line in listed] == [b"0", b"1", b"2"]


def decoys(directory: Path) -> None:
    """Fill *directory* with what Python or its C library would like to load."""
    for name in ("json.py", "ctypes.py", "os.py", "sitecustomize.py", "hooks.py", "fcntl.py"):
        (directory / name).write_text('raise SystemExit("decoy")\n')
    (directory / "pyvenv.cfg").write_text("home = .\n")
    (directory / "python311.zip").write_bytes(b"")
    for package in ("encodings", "hooks", "gpuruntime"):
        (directory / package).mkdir()
        (directory / package / "__init__.py").write_text('raise SystemExit("decoy")\n')


@needs_strace
def test_hook_opens_nothing_relative(bench: Bench, real: Path, tmp_path: Path) -> None:
    """A hook is started inside the container's rootfs: every relative name is the image's."""
    decoys(tmp_path)
    text, _ = trace(
        bench,
        *("-e", "trace=%file", "-s", "4096"),
        *(part for item in IMAGE_ENVIRONMENT.items() for part in ("-E", "=".join(item))),
        program=[str(real / "gpu-cdi-hook"), "update-container", "--mask-params"],
        cwd=str(tmp_path),
        stdin=subprocess.DEVNULL,
    )
    calls = [line for line in text.splitlines() if '"' in line]
    assert any("/hooks/entry" in line for line in calls), text[-2000:]
    assert str(tmp_path) not in text
    for line in calls:
        name = re.search(r'"((?:[^"\\]|\\.)*)"', line)
        assert name is not None
        # Below a directory that is open, which was named as the others here are.
        of_descriptor = re.match(r"[0-9 ]*[a-z]+at[0-9x]*\([0-9]+, ", line)
        assert name[1].startswith("/") or of_descriptor, line


@needs_strace
def test_control_sees_relative_opens(bench: Bench, tmp_path: Path) -> None:
    """The same trace of an interpreter started the naive way is not clean."""
    decoys(tmp_path)
    text, _ = trace(
        bench,
        *("-e", "trace=%file", "-s", "4096"),
        program=["/usr/bin/python3", "-m", "json"],
        cwd=str(tmp_path),
    )
    assert str(tmp_path) in text
