# SPDX-License-Identifier: Apache-2.0
"""The launcher as a file: small, static, nothing writable that can run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Bench, Workshop

CROSS_CC = "aarch64-linux-gnu-gcc"
MAX_BYTES = 16 << 10


def readelf(path: Path, option: str) -> str:
    """Return what readelf says about *path*."""
    command = ["readelf", "-W", option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def assert_hardened(path: Path) -> None:
    """Check size and segments of a launcher for any architecture."""
    assert path.stat().st_size <= MAX_BYTES
    segments = readelf(path, "-l")
    assert "INTERP" not in segments
    assert "DYNAMIC" not in segments
    flags = re.findall(r"^ +(LOAD|GNU_STACK) .* ([R ][W ][E ]) ", segments, re.MULTILINE)
    assert {kind for kind, _ in flags} == {"LOAD", "GNU_STACK"}
    for kind, flag in flags:
        assert not ("W" in flag and "E" in flag), segments
        assert kind == "LOAD" or "E" not in flag


def test_binary_is_small_static_and_has_no_writable_code(workshop: Workshop) -> None:
    """It runs in front of every container operation of a node."""
    assert_hardened(workshop.build("plain") / "launcher")


def test_only_constants_of_the_build_differ(workshop: Workshop, tmp_path: Path) -> None:
    """The same sources and constants make the same bytes: packagers compare them."""
    again = tmp_path / "launcher"
    workshop.compile_launcher(again)
    assert again.read_bytes() == (workshop.build("plain") / "launcher").read_bytes()


@pytest.mark.parametrize("level", ["-O0", "-O2", "-O3"])
def test_other_optimisation_levels_work_too(level: str, bench: Bench) -> None:
    """A distribution has its own flags; without a C library each hidden call must still link."""
    program = bench.workshop.build(f"level{level}", extra=(level,)) / "gpu-container-runtime"
    assert bench.start([str(program), "--root", "/r", "state"]).who == "lowlevel/runc"
    assert bench.start([str(program), "create"]).who == "python"


def instructions(bench: Bench, *command: str) -> int:
    """Return how many instructions *command* takes, counted by callgrind."""
    output = bench.path("empty/callgrind")
    done = subprocess.run(
        ["valgrind", "--tool=callgrind", f"--callgrind-out-file={output}", *command],
        env=bench.environment(),
        executable="/usr/bin/valgrind",
        capture_output=True,
        text=True,
        check=False,
    )
    counted = re.search(r"Collected : (\d+)", done.stderr)
    assert counted is not None, done.stderr
    return int(counted[1])


@pytest.mark.skipif(
    not os.path.exists("/usr/bin/valgrind"),
    reason="valgrind is not installed: the launcher's instructions are not counted",
)
def test_pass_through_costs_a_fiftieth_of_a_python_start_at_most(bench: Bench) -> None:
    """The budget of the start path; counted up to an exec that fails, for counting ends there."""
    bench.path("lowlevel/runc").write_text("not a program\n")
    bench.path("lowlevel/crun").unlink()
    program = bench.workshop.build("no-python", PYTHON="/nonexistent") / "gpu-container-runtime"
    arguments = ("--root", "/r", "--log", "/l", "--log-format", "json", "delete", "--force", "c1")
    floor = instructions(bench, "/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c", "pass")
    assert instructions(bench, str(program), *arguments) <= 0.02 * floor


@pytest.mark.skipif(
    shutil.which(CROSS_CC) is None,
    reason=f"{CROSS_CC} is not installed: the aarch64 launcher is not built",
)
def test_aarch64_builds_and_is_as_hardened(bench: Bench, tmp_path: Path) -> None:
    """Grace and Jetson nodes; the binary is run too where an emulator is installed."""
    binary = tmp_path / "launcher"
    bench.workshop.compile_launcher(binary, cc=CROSS_CC)
    assert "AArch64" in readelf(binary, "-h")
    assert_hardened(binary)
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        return
    for name, arguments, who in (
        ("gpu-container-runtime", ["--root", "/r", "state"], "lowlevel/runc"),
        ("gpu-container-runtime", ["create", "c1"], "python"),
        ("gpu-cdi-hook", ["update-container"], "python"),
    ):
        command = ["qemu", "-0", name, str(binary), *arguments]
        outcome = bench.start(command, program=emulator, habits=("ignore-pipe", "umask-none"))
        assert outcome.who == who, outcome.stderr
        assert outcome.record.arguments[-len(arguments) :] == [os.fsencode(a) for a in arguments]
        assert outcome.record.status["Umask"] == ("0022" if "hook" in name else "0777")
