# SPDX-License-Identifier: Apache-2.0
"""The role by argv[0], the start of Python, and the error without Python."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
import start_code
from launcher.conftest import VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Bench

RUNTIME_NAMES = [
    *("gpu-container-runtime", "nvidia-container-runtime"),
    *("nvidia-container-runtime.cdi", "nvidia-container-runtime.legacy"),
]
HOOK_NAMES = [
    *("gpu-cdi-hook", "gpu-container-runtime-hook", "nvidia-cdi-hook"),
    *("nvidia-container-runtime-hook", "nvidia-container-toolkit"),
]
# The constants of the build that all tests use.
LIBRARY = "/library"
CLI_PYTHON = "/cli/python"

ISOLATED = [b"-I", b"-S", b"-B", b"-X", b"utf8", b"-c"]
SHIM_CODE = start_code.code(LIBRARY, "shim", CLI_PYTHON).encode()
HOOK_CODE = start_code.code(LIBRARY, "hook", CLI_PYTHON).encode()


def identity(path: Path) -> bytes:
    """Return device and inode as the launcher tells them to the shim."""
    status = path.stat()
    return f"{status.st_dev}:{status.st_ino}".encode()


@pytest.mark.parametrize("name", RUNTIME_NAMES)
def test_runtime_names_start_the_shim(name: str, bench: Bench) -> None:
    """The incumbent's names must work as links, for a node that switches.

    The number is 4: there is no companion, so that the launcher could not decide.
    """
    outcome = bench.runtime("create", "c1", name=name)
    python, program = bench.path("python"), bench.workshop.build("plain") / name
    assert outcome.record.arguments == [
        *(os.fsencode(python), *ISOLATED, SHIM_CODE),
        *(b"4", identity(program), os.fsencode(program), b"create", b"c1"),
    ]


@pytest.mark.parametrize("name", HOOK_NAMES)
def test_hook_names_start_the_hook(name: str, bench: Bench) -> None:
    """The arguments are passed on unchanged, whatever they contain."""
    outcome = bench.hook("update-container", "--link", "", "-c", name=name)
    python, program = bench.path("python"), bench.workshop.build("plain") / name
    assert outcome.record.arguments == [
        *(os.fsencode(python), *ISOLATED, HOOK_CODE),
        *(os.fsencode(program), b"update-container", b"--link", b"", b"-c"),
    ]


@pytest.mark.parametrize("habit", [(), ("ignore-pipe",), ("ignore-signals",)])
def test_shim_learns_which_signals_were_ignored(habit: tuple[str, ...], bench: Bench) -> None:
    """CPython ignores SIGPIPE and SIGXFSZ at its start: only the launcher can still tell."""
    # Beside 4, for want of a companion.
    expected = {(): b"4", ("ignore-pipe",): b"5", ("ignore-signals",): b"7"}[habit]
    assert bench.runtime("create", habits=habit).record.arguments[8] == expected


def test_name_without_directory_is_enough(bench: Bench) -> None:
    """Engines resolve the runtime on PATH and keep the short name as argv[0]."""
    program = str(bench.workshop.build("plain") / "launcher")
    assert bench.start(["gpu-container-runtime", "state"], program=program).who == "lowlevel/runc"
    assert bench.start(["x/y/gpu-cdi-hook"], program=program).who == "python"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *((b"", ""), (b"/", ""), (b"launcher", "launcher"), (b"gpu-cdi-hook/", "")),
        *((b"gpu-cdi-hook2", "gpu-cdi-hook2"), (b"gpu-cdi-hoo", "gpu-cdi-hoo")),
        *((b"a\n\x1b[1m\xff", "a??[1m?"), (b"/gpu-cdi-hook/runc", "runc")),
    ],
)
@pytest.mark.parametrize("build", ["plain", "twin"])
def test_unknown_name_fails_closed(
    name: bytes, shown: str, build: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """Guessing a role would mean trusting an environment, or breaking an engine."""
    if build == "twin":
        request.getfixturevalue("twin")
    program = str(bench.workshop.build(build) / "launcher")
    outcome = bench.start([name, b"create"], program=program)
    assert (outcome.returncode, outcome.who, outcome.stdout) == (2, None, b"")
    assert outcome.stderr.decode() == (
        f"{shown}: request: no program of ours has this name\n"
        'hint: call it by one of its links, "gpu-container-runtime" or "gpu-cdi-hook"\n'
    )


@pytest.mark.parametrize("build", ["plain", "twin"])
def test_no_arguments_at_all_fails_closed(
    build: str, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """An empty argument list once ran pkexec's environment as its arguments (CVE-2021-4034)."""
    if build == "twin":
        request.getfixturevalue("twin")
    program = str(bench.workshop.build(build) / "launcher")
    outcome = bench.start(["unused"], program=program, habits=("no-arguments",))
    assert (outcome.returncode, outcome.who) == (2, None)
    assert b"no program of ours has this name" in outcome.stderr


def test_a_mebibyte_of_arguments_arrives(bench: Bench) -> None:
    """In each role and on each way; argument lists are limited by the kernel alone."""
    many = ["x" * 1023] * 1024
    outcome = bench.runtime("exec", *many)
    assert outcome.record.arguments[1:] == [b"exec", *(word.encode() for word in many)]
    outcome = bench.runtime("create", *many)
    assert outcome.record.arguments[11:] == [b"create", *(word.encode() for word in many)]
    outcome = bench.hook(*many)
    assert outcome.record.arguments[9:] == [word.encode() for word in many]


def test_many_short_arguments_arrive(bench: Bench) -> None:
    """Python's own arguments go in front of ours without a copy, so no buffer bounds them."""
    outcome = bench.hook(*["x"] * 100_000)
    assert len(outcome.record.arguments) == 9 + 100_000


@pytest.mark.parametrize("name", ["gpu-container-runtime", "gpu-cdi-hook"])
@pytest.mark.parametrize(
    ("spoil", "code", "reason"),
    [
        ("missing", 127, "no such file or directory"),
        ("not-a-directory", 127, "errno 20"),
        ("not-executable", 126, "permission denied"),
        ("directory", 126, "permission denied"),
        ("not-a-program", 126, "exec format error"),
    ],
)
def test_python_that_cannot_be_executed_is_named(
    spoil: str, code: int, reason: str, name: str, bench: Bench
) -> None:
    """The exit codes are a shell's; the container is never started without its hook."""
    python = bench.path("python")
    python.unlink()
    program = bench.workshop.build("plain") / name
    if spoil == "not-a-directory":
        program = bench.workshop.build("odd", PYTHON=f"{bench.path('recorder')}/python") / name
        python = bench.path("recorder") / "python"
    elif spoil == "not-executable":
        bench.put("python").chmod(0o644)
    elif spoil == "directory":
        python.mkdir()
    elif spoil == "not-a-program":
        python.write_text("print()\n")
        python.chmod(0o755)
    try:
        outcome = bench.start([str(program), "create", "c1"])
    finally:
        if spoil == "directory":
            python.rmdir()
    assert (outcome.returncode, outcome.who, outcome.stdout) == (code, None, b"")
    assert outcome.stderr.decode() == (
        f'{name}: runtime: cannot execute "{python}": {reason}\n'
        f'hint: install Python 3.9 or newer as "{python}"\n'
    )


def test_version_is_ours_and_then_the_runtimes(bench: Bench) -> None:
    """Engines read the low-level runtime's version out of the same text."""
    runc = bench.path("lowlevel/runc")
    runc.write_text("#!/bin/sh\necho runc version 1.2.3\n")
    outcome = bench.runtime("--version")
    expected = f"gpu-container-runtime version {VERSION}\n\nrunc version 1.2.3\n"
    assert outcome.stdout.decode() == expected
    assert outcome.stderr == b""
    assert outcome.returncode == 0


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_exit_code_is_the_low_level_runtimes_own(code: int, bench: Bench) -> None:
    """There is nobody left of us who could change it."""
    bench.path("lowlevel/runc").write_text(f"#!/bin/sh\nexit {code}\n")
    assert bench.runtime("state").returncode == code


def test_closed_output_does_not_stop_the_version(bench: Bench) -> None:
    """Nor does a full pipe: the low-level runtime decides what that means."""
    for habit in ("no-stdio", "full-stdout"):
        assert bench.runtime("--version", habits=(habit,)).who == "lowlevel/runc"


def test_records_are_complete(bench: Bench) -> None:
    """The control of this directory: with a wrong recorder every test would pass."""
    outcome = bench.start([str(bench.path("lowlevel/runc")), "a", ""], env={"A": "1"})
    assert outcome.record.arguments == [os.fsencode(bench.path("lowlevel/runc")), b"a", b""]
    assert outcome.record.environment == [b"A=1"]
    assert sorted(outcome.record.descriptors) == [0, 1, 2]
    assert outcome.record.process["pid"] == outcome.pid
    assert outcome.record.process["ppid"] == os.getpid()
    plain = subprocess.run(["umask"], shell=True, capture_output=True, text=True, check=True)
    assert int(outcome.record.status["Umask"], 8) == int(plain.stdout, 8)
