# SPDX-License-Identifier: Apache-2.0
"""`cdi transform root`, as a program: the incumbent's flags, formats, versions, errors."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import forked_cli
import pytest

from cdi import yamlio

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[4]
SPEC: dict[str, Any] = {
    "cdiVersion": "0.6.0",
    "kind": "vendor.test/class",
    "devices": [
        {
            "name": "d",
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/a", "hostPath": "/run/driver/dev/a"}],
                "hooks": [
                    {
                        "hookName": "createContainer",
                        "path": "/run/driver/bin/h",
                        "args": ["h", "--link", "/run/driver/x::/y"],
                    }
                ],
                "mounts": [{"hostPath": "/run/driver/lib", "containerPath": "/run/driver/lib"}],
            },
        }
    ],
}
ARGUMENTS = ("--from", "/run/driver", "--to", "/host")


def run(*arguments: str, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime cdi transform root` with *arguments*."""
    return forked_cli.run("cdi", "transform", "root", *arguments, given=stdin, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a file that holds SPEC."""
    path = tmp_path / "in.json"
    path.write_text(json.dumps(SPEC))
    return path


def test_the_host_side_is_the_default_and_yaml_goes_to_standard_output(source: Path) -> None:
    """As with the incumbent; nothing is said on standard error."""
    ran = run(*ARGUMENTS, "--input", str(source))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith('---\ncdiVersion: "0.6.0"\n')
    found: Any = yamlio.decode(ran.stdout)
    assert found["devices"][0]["containerEdits"] == {
        "deviceNodes": [{"path": "/dev/a", "hostPath": "/host/dev/a"}],
        "hooks": [
            {
                "hookName": "createContainer",
                "path": "/host/bin/h",
                "args": ["h", "--link", "/run/driver/x::/y"],
            }
        ],
        "mounts": [{"hostPath": "/host/lib", "containerPath": "/run/driver/lib"}],
    }
    for arguments in ((), ("--input", "-"), ("--input=", "--output=", "--relative-to=host")):
        again = run(*ARGUMENTS, *arguments, stdin=source.read_bytes())
        assert (again.returncode, again.stdout) == (0, ran.stdout)


def test_the_container_side(source: Path) -> None:
    """What the programs in the container see."""
    ran = run(*ARGUMENTS, "--relative-to", "container", "--input", str(source))
    found: Any = yamlio.decode(ran.stdout)
    assert found["devices"][0]["containerEdits"] == {
        "deviceNodes": [{"path": "/dev/a", "hostPath": "/run/driver/dev/a"}],
        "hooks": [
            {
                "hookName": "createContainer",
                "path": "/run/driver/bin/h",
                "args": ["h", "--link", "/host/x::/y"],
            }
        ],
        "mounts": [{"hostPath": "/run/driver/lib", "containerPath": "/host/lib"}],
    }


@pytest.mark.parametrize(
    ("output", "expected"),
    [("a.json", "a.json"), ("a.yaml", "a.yaml"), ("a.yml", "a.yml"), ("a", "a.yaml")],
)
def test_the_ending_decides_on_the_format(
    source: Path, tmp_path: Path, output: str, expected: str
) -> None:
    """The file is made at once, for anybody to read."""
    out = tmp_path / "out"
    out.mkdir()
    ran = run(*ARGUMENTS, "--input", str(source), "--output", str(out / output))
    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr == f'wrote "{out / expected}"\n'
    assert os.listdir(out) == [expected]
    assert stat.S_IMODE((out / expected).stat().st_mode) == 0o644
    text = (out / expected).read_text()
    assert text.startswith("{" if expected == "a.json" else "---\n")
    found: Any = yamlio.decode(text)
    printed: Any = yamlio.decode(run(*ARGUMENTS, stdin=source.read_bytes()).stdout)
    assert found["devices"] == printed["devices"]


def test_a_file_can_be_rewritten_in_place(source: Path) -> None:
    """It is read as a whole before anything is written."""
    assert run(*ARGUMENTS, "--input", str(source), "--output", str(source)).returncode == 0
    assert json.loads(source.read_text())["devices"][0]["containerEdits"]["mounts"] == [
        {"hostPath": "/host/lib", "containerPath": "/run/driver/lib"}
    ]


def test_the_version_is_kept_or_computed() -> None:
    """What is missing is computed; what is too low for a host path is raised, with a warning."""
    spec = {
        **SPEC,
        "devices": [{"name": "d", "containerEdits": {"deviceNodes": [{"path": "/a"}]}}],
    }
    for claimed, expected, warning in (
        ("1.0.0", "1.0.0", ""),
        ("", "0.5.0", "warning: the new spec needs version 0.5.0, not 0.3.0\n"),
        ("0.3.0", "0.5.0", "warning: the new spec needs version 0.5.0, not 0.3.0\n"),
        (None, "0.5.0", "warning: the new spec needs version 0.5.0, not 0.3.0\n"),
    ):
        ran = run("--to=/x", stdin=json.dumps({**spec, "cdiVersion": claimed}).encode())
        assert (ran.returncode, ran.stderr) == (0, warning)
        assert f'cdiVersion: "{expected}"\n' in ran.stdout


def test_the_same_root_changes_nothing(source: Path) -> None:
    """Also none at all."""
    for arguments in ((), ("--from", "/a", "--to", "/a/")):
        ran = run(*arguments, "--input", str(source))
        assert yamlio.decode(ran.stdout) == SPEC


BAD: tuple[tuple[bytes, str], ...] = (
    (b"", "no-data"),
    (b"{", "syntax"),
    (b"\xff\xfe", "syntax"),
    (b"[]", "wrong-type"),
    (b"a: 1\na: 2\n", "duplicate-key"),
    (json.dumps({**SPEC, "more": 1}).encode(), "unknown-field"),
    (json.dumps({**SPEC, "cdiVersion": "0.4.0"}).encode(), "version-too-low"),
    (json.dumps({**SPEC, "cdiVersion": "", "devices": []}).encode(), "no-devices"),
    (json.dumps({**SPEC, "cdiVersion": None, "kind": 7}).encode(), "vendor"),
    (b"!!python/object/apply:os.system [true]", "syntax"),
    (b"[" * 100_000, "syntax"),
    (b"a: &a [" + b"x," * 1000 + b"]\nb: [" + b"*a," * 1000 + b"]\n", "syntax"),
    (b"#" * (5 << 20), "syntax"),
)


def check_error(ran: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """Check that a run failed with *status*, one line and a hint; return the line."""
    assert (ran.returncode, ran.stdout) == (status, "")
    found = re.fullmatch(r"(error: [a-z]+: [ -~]+)\nhint: [ -~]+\n", ran.stderr)
    assert found, ran.stderr
    return found[1]


@pytest.mark.parametrize(("data", "category"), BAD)
def test_what_does_not_load_is_refused(tmp_path: Path, data: bytes, category: str) -> None:
    """By the loader's rules; nothing is printed or written."""
    output = str(tmp_path / "a.yaml")
    ran = run(*ARGUMENTS, "--output", output, stdin=data, processor_s=5)
    assert f"cannot use standard input: {category}: " in check_error(ran)
    assert os.listdir(tmp_path) == []


def test_files_that_are_none(tmp_path: Path) -> None:
    """Neither hangs nor a traceback."""
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", ".", "missing", "a\nb"):
        error = check_error(run(*ARGUMENTS, "--input", str(tmp_path / name)))
        assert "cannot use" in error if name in ("fifo", ".") else "cannot read" in error


def test_outputs_that_cannot_be(source: Path, tmp_path: Path) -> None:
    """The input is there still, and no temporary file is left."""
    arguments = (*ARGUMENTS, "--input", str(source), "--output")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "d.yaml").mkdir()
    for name, text in (
        ("open/a.yaml", "lets other users replace files in it"),
        ("missing/a.yaml", "there is no directory"),
        ("link/a.yaml", "symlink"),
        ("d.yaml", "directory"),
        ("in.json/a.yaml", "irectory"),
        ("x" * 300, "too long"),
    ):
        assert text in check_error(run(*arguments, str(tmp_path / name)))
    assert sorted(os.listdir(tmp_path)) == ["d.yaml", "in.json", "link", "open"]
    assert os.listdir(tmp_path / "open") == []
    with open("/dev/full", "wb") as full:
        ran = run(*ARGUMENTS, "--input", str(source), stdout=full)
    assert "cannot write to standard output: No space left" in check_error(ran)


def test_usage() -> None:
    """A relative root is no root; there are two sides."""
    for option in ("--from", "--to"):
        assert f'"{option} a/b" is not absolute' in check_error(run(option, "a/b"), 2)
    ran = run("--relative-to", "other")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--relative-to" in ran.stderr
