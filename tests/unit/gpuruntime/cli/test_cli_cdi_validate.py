# SPDX-License-Identifier: Apache-2.0
"""`cdi validate`, as a program: lines, exit codes, and files that are no files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import forked_cli
import pytest

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[4]
GOOD = """\
cdiVersion: "0.3.0"
kind: "vendor.test/class"
devices:
- name: "d"
  containerEdits:
    env: ["A=b"]
"""
WARNED = GOOD.replace("A=b", "LD_AUDIT=b")
BAD = GOOD.replace("A=b", "A").replace("class", "c-")


def run(
    *arguments: str | Path, stdin: str | bytes = b"", stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime cdi validate` with *arguments*; it is ended if it costs much."""
    words = ("cdi", "validate", *arguments)
    return forked_cli.run(*words, given=stdin, stdout=stdout, processor_s=4)


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """Return a directory with a good spec, one that is warned of, and a bad one."""
    for name, text in (("good.yaml", GOOD), ("warned.yaml", WARNED), ("bad.yaml", BAD)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_each_problem_is_a_line_with_file_and_line(specs: Path) -> None:
    """Of all files in one run; errors and warnings can be told apart."""
    bad, warned, good = (specs / f"{name}.yaml" for name in ("bad", "warned", "good"))
    done = run(bad, warned, good)
    assert done.stdout == (
        f'{bad}:2: error: class: kind: "c-" is not a class name\n'
        f'{bad}:6: error: env: devices[0].containerEdits.env[0]: "A" is not NAME=value\n'
        f"{warned}:6: warning: env-loader: devices[0].containerEdits.env[0]: "
        '"LD_AUDIT" makes programs load code from elsewhere\n'
    )
    assert done.stderr == "3 files: 2 errors, 1 warning\n"
    assert done.returncode == 1


def test_a_warning_fails_only_if_that_is_asked_for(specs: Path) -> None:
    """Plain, the exit code says whether loaders take the spec."""
    assert run(specs / "warned.yaml").returncode == 0
    assert run("--strict", specs / "warned.yaml").returncode == 1
    done = run("--strict", specs / "good.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "1 file: 0 errors, 0 warnings\n")


def test_json_is_a_list_of_objects(specs: Path) -> None:
    """One for each problem, the same exit codes."""
    done = run("--json", specs / "warned.yaml")
    assert done.returncode == 0
    assert json.loads(done.stdout) == [
        {
            "file": str(specs / "warned.yaml"),
            "line": 6,
            "severity": "warning",
            "category": "env-loader",
            "where": "devices[0].containerEdits.env[0]",
            "message": '"LD_AUDIT" makes programs load code from elsewhere',
        }
    ]
    assert json.loads(run("--json", specs / "good.yaml").stdout) == []
    assert run("--json", specs / "bad.yaml").returncode == 1


def test_standard_input_is_a_file_too() -> None:
    """JSON or YAML, with or without a byte order mark."""
    assert run("-", stdin=GOOD).returncode == 0
    assert run("-", stdin=b"\xef\xbb\xbf" + GOOD.encode()).returncode == 0
    done = run("-", stdin='{"kind": 7,\n "x": "y"}')
    assert "-:1: error: vendor: kind:" in done.stdout
    assert "-:2: error: unknown-field: x:" in done.stdout


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("missing", "error: syntax: cannot read it: No such file or directory"),
        ("fifo", "error: syntax: not a regular file"),
        ("device", "error: syntax: not a regular file"),
        ("huge", "error: syntax: larger than"),
        ("binary", "error: syntax: not UTF-8 at byte 0"),
        ("deep", ":1: error: syntax:"),
        ("bomb", "error: syntax: more than"),
        ("control", "error: unknown-field: \\x1b[31m"),
    ],
)
def test_what_is_no_spec_is_one_clean_line(tmp_path: Path, kind: str, told: str) -> None:
    """No hang, no traceback; and the good file beside it is looked at as well."""
    path = tmp_path / "odd.yaml"
    bomb = "a0: &a0 [x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
    )
    contents = {
        "binary": b"\xff\xfe\0",
        "deep": b"[" * 1_000_000,
        "bomb": bomb.encode(),
        "control": GOOD.encode() + b'"\\e[31m": 1\n',
    }
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 30)
    elif kind in contents:
        path.write_bytes(contents[kind])
    good = tmp_path / "good.yaml"
    good.write_text(WARNED)
    done = run(path, good)
    first, second = done.stdout.splitlines()
    assert told in first
    assert first.startswith(f"{path}:")
    assert second.startswith(f"{good}:6: warning:")
    assert (done.returncode, done.stderr) == (1, "2 files: 1 error, 1 warning\n")


def test_an_unreadable_name_is_printed_as_ascii(tmp_path: Path) -> None:
    """A file's name must not forge lines either."""
    path = tmp_path / "a\nb.yaml"
    path.write_text(BAD)
    assert f"{tmp_path}/a\\x0ab.yaml:2: error:" in run(path).stdout
    assert json.loads(run("--json", path).stdout)[0]["file"] == str(path)


def test_an_ending_that_loaders_pass_over_is_warned_of(tmp_path: Path) -> None:
    """The spec may be good; nobody will look at it."""
    path = tmp_path / "good.yml"
    path.write_text(GOOD)
    done = run(path)
    assert done.stdout.startswith(f"{path}: warning: file-name: ")
    assert done.returncode == 0


def test_this_host_s_files_are_looked_at(tmp_path: Path) -> None:
    """A hook that is not there keeps containers from starting."""
    hook = f'    hooks: [{{hookName: poststop, path: "{tmp_path}/hook", env: ["A=b"]}}]\n'
    path = tmp_path / "s.yaml"
    path.write_text(GOOD + hook)
    assert "hook-program" in run("--strict", path).stdout
    (tmp_path / "hook").write_text("#!/bin/sh\n")
    (tmp_path / "hook").chmod(0o755)
    assert run("--strict", path).returncode == 0


def test_a_full_disk_is_an_error(specs: Path) -> None:
    """What could not be printed must not look like success."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run(specs / "warned.yaml", stdout=full)
    finally:
        os.close(full)
    assert done.returncode == 1
    assert done.stderr.startswith("error: runtime: cannot write to standard output: No space left")


def test_without_a_file_it_does_not_wait_for_standard_input() -> None:
    """It checks the spec directories."""
    assert "-:" not in run(stdin="[").stdout
