# SPDX-License-Identifier: Apache-2.0
"""`cdi diff`, as a program: lines, JSON, and diff's exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import forked_cli
import pytest

from cdi import yaml_text

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[4]
SPEC: dict[str, Any] = {
    "cdiVersion": "0.5.0",
    "kind": "vendor.test/class",
    "devices": [{"name": "d", "containerEdits": {"env": ["A=b"]}}],
}
OTHER = {**SPEC, "devices": [{"name": "d", "containerEdits": {"env": ["A=\u00e9\n"]}}]}


def run(*arguments: str, stdin: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime cdi diff` with *arguments*."""
    return forked_cli.run("cdi", "diff", *arguments, given=stdin, **options)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    """Return a spec as JSON, the same as YAML, and another."""
    paths = [tmp_path / name for name in ("a.json", "a.yaml", "b.json")]
    paths[0].write_text(json.dumps(SPEC))
    paths[1].write_text(yaml_text.encode(dict(reversed(SPEC.items()))))
    paths[2].write_text(json.dumps(OTHER))
    one, same, other = map(str, paths)
    return one, same, other


def test_equal_specs(files: tuple[str, str, str]) -> None:
    """Nothing to say, whatever the format; exit 0."""
    ran = run(*files[:2])
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    ran = run("-", files[1], stdin=json.dumps(SPEC))
    assert (ran.returncode, ran.stdout) == (0, "")
    ran = run("--json", *files[:2])
    assert (ran.returncode, json.loads(ran.stdout)) == (0, {"equal": True, "changes": []})


def test_different_specs(files: tuple[str, str, str]) -> None:
    """A line that nothing in a file can break; exit 1."""
    ran = run(files[0], files[2])
    expected = '~ device "d": env "A": "A=b" -> "A=\\xc3\\xa9\\n"\n'
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, expected, "")
    ran = run("--json", files[0], "-", stdin=json.dumps(OTHER))
    change = {"what": "changed", "where": 'device "d"', "item": 'env "A"'}
    change |= {"old": "A=b", "new": "A=\u00e9\n"}
    assert ran.returncode == 1
    assert json.loads(ran.stdout) == {"equal": False, "changes": [change]}


def test_trouble_is_2(files: tuple[str, str, str], tmp_path: Path) -> None:
    """A script can tell an answer from none."""
    os.mkfifo(tmp_path / "fifo")
    for arguments, text in (
        ((files[0], str(tmp_path / "missing")), "cannot read"),
        ((str(tmp_path / "fifo"), files[0]), "not a regular file"),
        ((files[0], str(tmp_path)), "not a regular file"),
        ((files[0], "-"), "cannot use standard input: no-data"),
        (("-", "-"), "one spec, not two"),
    ):
        ran = run(*arguments)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert re.fullmatch(r"error: [a-z]+: [ -~]+\nhint: [ -~]+\n", ran.stderr)
        assert text in ran.stderr
    with open("/dev/full", "w") as full:
        ran = run(files[0], files[2], stdout=full)
    assert (ran.returncode, "No space left" in ran.stderr) == (2, True)
    assert run(files[0]).returncode == 2
