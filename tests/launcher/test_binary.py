# SPDX-License-Identifier: Apache-2.0
"""The launcher as a file: small, static, nothing writable that can run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from launcher.bundles import write_bundle, write_companion
from launcher.conftest import Bench

from gpuruntime.cli.checks.examined_machine import ExaminedMachine
from gpuruntime.config import Config
from gpuruntime.launcher import companion

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from launcher.conftest import Workshop

CROSS_CC = "aarch64-linux-gnu-gcc"
MAX_BYTES = 32 << 10


def readelf(path: Path, option: str) -> str:
    """Return what readelf says about *path*."""
    command = ["readelf", "-W", option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_doctor_knows_it(bench: Bench) -> None:
    """By what is in it, whichever name it has; and no other program."""
    machine = ExaminedMachine()
    assert machine.is_ours(str(bench.workshop.build("plain") / "launcher"))
    assert not machine.is_ours(str(bench.path("lowlevel/runc")))


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


counted = pytest.mark.skipif(
    not os.path.exists("/usr/bin/valgrind"),
    reason="valgrind is not installed: the launcher's instructions are not counted",
)


@pytest.fixture(scope="module")
def floor(workshop: Workshop) -> int:
    """Return what a start of the bare interpreter takes, in instructions."""
    return instructions(
        Bench(workshop), "/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c", "pass"
    )


def cost(bench: Bench, *arguments: str) -> int:
    """Return what a pass-through takes, up to an exec that fails, for counting ends there."""
    bench.path("lowlevel/runc").write_text("not a program\n")
    bench.path("lowlevel/crun").unlink(missing_ok=True)
    program = bench.workshop.build("no-python", PYTHON="/nonexistent") / "gpu-container-runtime"
    return instructions(bench, str(program), *arguments)


@counted
def test_pass_through_costs_a_fiftieth_of_a_python_start_at_most(bench: Bench, floor: int) -> None:
    """The budget of the start path."""
    arguments = ("--root", "/r", "--log", "/l", "--log-format", "json", "delete", "--force", "c1")
    assert cost(bench, *arguments) <= 0.02 * floor


# What engines write: names, and digests. The last is the worst for the search, which an image can
# have in its environment: pairs of bytes that begin a word.
TEXTS = {
    "names": '{"names": ["CAP_NET_RAW", "clock_getres", "io_uring_setup"], "action": "ALLOW"}, ',
    "digests": "".join(hashlib.sha256(bytes([i])).hexdigest() for i in range(100)),
    "pairs": "cdenvgpu",
}


@counted
@pytest.mark.parametrize(
    ("text", "size", "a_byte"),
    [
        *((name, 8 << 10, 6) for name in TEXTS),
        *(("names", 1 << 20, 6), ("digests", 1 << 20, 6), ("pairs", 1 << 20, 50)),
    ],
)
def test_a_create_without_a_gpu_costs_little_more(
    text: str,
    size: int,
    a_byte: int,
    bench: Bench,
    floor: int,
    record_property: Callable[[str, object], None],
) -> None:
    """Six instructions a byte, with the words that the defaults have; never without end."""
    content = companion.content(Config({}, None), None)
    assert content is not None
    write_companion(bench, content.decode())
    bundle = write_bundle(bench, (TEXTS[text] * (size // len(TEXTS[text]) + 1))[:size])
    arguments = ("--root", "/r", "--log", "/l", "create", "--bundle", str(bundle), "c1")
    # That the search has seen all of it, and found nothing.
    assert bench.runtime(*arguments).who == "lowlevel/runc"
    taken = cost(bench, *arguments)
    record_property(
        "summary",
        f"launcher, create of {size} bytes ({text}): {taken} instructions, {taken / size:.1f} a "
        f"byte, {taken / floor:.4f} of a bare interpreter's start",
    )
    assert taken <= 0.02 * floor + a_byte * size


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
