# SPDX-License-Identifier: Apache-2.0
"""`make` installs what a target needs and no more, and says which step of long work it is at."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
DEMO_PACKAGES = {"gcc", "binutils"}
# Looked up by absolute paths, or in root's directories: this machine may have them.
MORE_DEMO_PACKAGES = {"libc6-dev", "python3", "python3-venv", "busybox-static", "runc"}
APT = """#!/bin/sh
echo "$@" >>"$APT_CALLS"
if [ "$1" = install ]; then echo "E: no $*" >&2; exit "${APT_STATUS:-0}"; fi
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine without our packages, where apt-get is a recorder."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("sh", "id", "mktemp", "rm", "tail"):
        (directory / name).symlink_to(shutil.which(name) or "")
    (directory / "apt-get").write_text(APT)
    (directory / "apt-get").chmod(0o755)
    return {
        "PATH": str(directory),
        "APT_CALLS": str(tmp_path / "calls"),
        "TMPDIR": str(tmp_path),
        # Finds no module: what /usr/bin has is not looked up on PATH.
        "PYTHON": "/nonexistent",
    }


def setup(environment: dict[str, str], *groups: str) -> tuple[int, str, list[list[str]]]:
    """Run scripts/setup; return its status, its errors, and the words of apt-get's calls."""
    done = subprocess.run(
        [TREE / "scripts" / "setup", *groups],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    calls = Path(environment["APT_CALLS"])
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, done.stderr, [line.split() for line in lines]


def is_root_only() -> pytest.MarkDecorator:
    """Skip a test without root: setup installs nothing then."""
    return pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@is_root_only()
def test_the_demo_needs_few_packages(bare: dict[str, str], tmp_path: Path) -> None:
    """Engines and cross compilers are for the tests; recommended packages for nobody here."""
    status, errors, (update, install) = setup(bare, "demo")
    assert status == 0, errors
    assert update == ["update", "-qq"]
    assert install[:4] == ["install", "-y", "-qq", "--no-install-recommends"]
    packages = set(install[4:])
    assert packages >= DEMO_PACKAGES
    assert packages <= DEMO_PACKAGES | MORE_DEMO_PACKAGES
    assert f"setup: installing {' '.join(install[4:])}\n" in errors
    assert [path.name for path in tmp_path.iterdir()].count("calls") == 1
    assert len(list(tmp_path.iterdir())) == 2


@is_root_only()
def test_a_machine_for_the_tests_gets_all(bare: dict[str, str]) -> None:
    """With what they recommend: podman needs some of it."""
    status, errors, (_, install) = setup(bare, "demo", "test")
    assert status == 0, errors
    assert set(install) >= {*DEMO_PACKAGES, "crun", "containerd", "docker.io", "podman"}
    assert "--no-install-recommends" not in install


@is_root_only()
def test_a_quiet_setup_says_only_what_fails(bare: dict[str, str]) -> None:
    """By `make -s`."""
    assert setup({**bare, "QUIET": "s"}, "demo")[:2] == (0, "")
    status, errors, _ = setup({**bare, "QUIET": "s", "APT_STATUS": "100"}, "demo")
    assert status == 1
    first, second, third = errors.splitlines()
    assert first.startswith("E: no install")
    assert second.startswith("setup: apt-get failed: gcc")
    assert third.startswith("hint: run: apt-get update && apt-get install")


@pytest.mark.parametrize(
    ("target", "groups"),
    [
        ("demo", ["demo"]),
        ("setup", ["demo test release", "demo"]),
        ("setup SHORT=1", ["demo test", "demo"]),
    ],
)
def test_a_target_installs_the_packages_of_its_group(target: str, groups: list[str]) -> None:
    """As the recipes say that make would run."""
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "-C", str(TREE), *target.split(), "PYTHON=/python"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    calls = [line for line in done.stdout.splitlines() if line.startswith("PYTHON='/python' ")]
    assert calls == [f"PYTHON='/python' scripts/setup {words}" for words in groups]


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ([], ""),
        (["-s"], "s"),
        (["-ks"], "s"),
        (["-j2", "--output-sync=target"], ""),
        (["--no-print-directory", "PREFIX=/usr"], ""),
        (["--silent", "PREFIX=/usr"], "s"),
    ],
)
def test_make_s_makes_the_scripts_quiet(flags: list[str], value: str) -> None:
    """And no other option does, whatever letters it has."""
    show = "show:; @echo QUIET=$(QUIET)."
    done = subprocess.run(
        ["make", *flags, "-C", str(TREE), "-f", "Makefile", "--eval", show, "show"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"QUIET={value}." in done.stdout.splitlines()


def test_steps_are_counted_and_those_without_work_are_left_out() -> None:
    """One line a step on standard error, so that standard output stays the result's."""
    script = ". scripts/progress; steps deb 3; step one; skip_step; step three"
    for variables, errors in (({}, "deb: 1/3 one\ndeb: 3/3 three\n"), ({"QUIET": "s"}, "")):
        done = subprocess.run(
            ["sh", "-euc", script],
            cwd=TREE,
            env={"PATH": os.environ["PATH"], **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("", errors)


@pytest.mark.parametrize("name", ["bundle", "deb", "install", "release"])
def test_the_announced_number_of_steps_is_the_number_of_steps(name: str) -> None:
    """Counted in the script with all its options; one in a function counts for each call."""
    text = (TREE / "scripts" / name).read_text()
    line = re.compile(r"^steps \w+ (?:\$\(\((\d+) \+ \$\{\w+:-0\}\)\)|(\d+))", re.MULTILINE)
    ((fewest, number),) = line.findall(text)
    total = int(fewest) + 1 if fewest else int(number)
    body = r"(?:  .*\n)*?"
    function = re.search(rf"^(\w+)\(\) {{\n{body}  step .*\n{body}}}", text, re.MULTILINE)
    calls = 0
    if function:
        calls = len(re.findall(rf"(?:^|then ){function[1]} ", text, re.MULTILINE)) - 1
    steps = [line for line in text.splitlines() if line.strip().startswith("step ")]
    assert len(steps) + calls == total
