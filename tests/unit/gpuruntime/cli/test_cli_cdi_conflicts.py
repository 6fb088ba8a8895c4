# SPDX-License-Identifier: Apache-2.0
"""Two files of one directory that define the same devices: who writes them, and who says so."""

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
OLDER_S, NEWER_S = 1_700_000_000, 1_700_000_100


def run(specs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime cdi` with *arguments* where *specs* is the one spec directory."""
    environment = {**os.environ, "GPURUNTIME_CDI_SPEC_DIRS": str(specs)}
    return forked_cli.run("cdi", *arguments, env=environment)


def write(path: Path, *devices: str, kind: str = "v.com/card", at_s: int = OLDER_S) -> str:
    """Write a spec that defines *devices*, as of *at_s*, and return its path."""
    entries = [{"name": name, "containerEdits": {"env": ["A=b"]}} for name in devices]
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": entries}))
    path.chmod(0o644)
    os.utime(path, (at_s, at_s))
    return str(path)


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """Return a spec directory with the older of two specs."""
    place = tmp_path / "cdi"
    place.mkdir(mode=0o755)
    write(place / "old.json", "0", "1")
    return place


def test_a_writer_refuses_what_another_file_defines(specs: Path, tmp_path: Path) -> None:
    """One line that names the other file, one action, and nothing written; --force writes."""
    source = write(tmp_path / "source.json", "1", "2")
    words = ("transform", "root", "--input", source, "--output", f"{specs}/new.yaml")
    done = run(specs, *words)
    assert done.returncode == 1
    assert done.stderr == (
        f'error: spec: cannot write "{specs}/new.yaml": "{specs}/old.json" defines "v.com/card=1" '
        "too, and engines resolve no device that two files of one directory define\n"
        f'hint: remove "{specs}/old.json", or write to that file; "--force" writes both\n'
    )
    assert os.listdir(specs) == ["old.json"]
    done = run(specs, *words, "--force")
    assert done.returncode == 0
    assert done.stderr.startswith(f'warning: "{specs}/old.json" defines "v.com/card=1" too')
    assert sorted(os.listdir(specs)) == ["new.yaml", "old.json"]


@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        pytest.param("cdi/old.json", ("0", "2"), "v.com/card", id="the same file"),
        pytest.param("cdi/new.json", ("2",), "v.com/card", id="other devices"),
        pytest.param("cdi/new.json", ("0",), "v.com/disk", id="another kind"),
        pytest.param("new.json", ("0",), "v.com/card", id="no spec directory"),
    ],
)
def test_a_writer_refuses_nothing_else(
    specs: Path, tmp_path: Path, name: str, devices: tuple[str, ...], kind: str
) -> None:
    """Whatever is not a conflict for engines is written as before."""
    write(tmp_path / "beside.json", "0")
    source = write(tmp_path / "source.txt", *devices, kind=kind)
    done = run(specs, "transform", "root", "--input", source, "--output", str(tmp_path / name))
    assert (done.returncode, done.stderr) == (0, f'wrote "{tmp_path / name}"\n')


def test_a_file_that_only_engines_use_counts(specs: Path, tmp_path: Path) -> None:
    """Engines do not look at who may write a spec, so it takes the devices away all the same."""
    (specs / "old.json").chmod(0o666)
    source = write(tmp_path / "source.json", "1")
    done = run(specs, "transform", "root", "--input", source, "--output", f"{specs}/new.json")
    assert (done.returncode, os.listdir(specs)) == (1, ["old.json"])


@pytest.mark.parametrize("way", ["nothing", "directory", "both files", "one file", "another cwd"])
def test_validate_names_both_files_and_the_one_to_remove(specs: Path, way: str) -> None:
    """However the files are named; the older is the one to remove."""
    new = write(specs / "new.json", "1", "2", at_s=NEWER_S)
    old = f"{specs}/old.json"
    told = {
        one: f'{one}: error: conflict: "{other}" defines "v.com/card=1" too, which resolves '
        f'nowhere then: remove "{old}"\n'
        for one, other in ((old, new), (new, old))
    }
    words, wanted = {
        "nothing": ((), told.values()),
        "directory": ((str(specs),), told.values()),
        "both files": ((old, new), told.values()),
        "one file": ((new,), [told[new]]),
        "another cwd": ((os.path.relpath(old, TREE),), [told[old].replace(old, "", 1)]),
    }[way]
    done = run(specs, "validate", *words)
    lines = done.stdout.splitlines(keepends=True)
    if way == "another cwd":
        lines = [lines[0][lines[0].index(": error") :]]
    assert (done.returncode, lines) == (1, list(wanted))


def test_validate_of_directories_without_a_conflict(specs: Path, tmp_path: Path) -> None:
    """Names of a directory are checked each; a file that only stands beside others is not."""
    write(specs / "new.yml", "0")
    (specs / "README").write_text("[")
    done = run(specs, "validate")
    assert done.stdout == (
        f"{specs}/new.yml: warning: file-name: in a spec directory only files ending in .json or "
        ".yaml are read\n"
    )
    assert (done.returncode, done.stderr) == (0, "2 files: 0 errors, 1 warning\n")
    one, other = write(tmp_path / "a.json", "0"), write(tmp_path / "b.json", "0")
    assert run(specs, "validate", one, other).returncode == 0
    assert run(tmp_path / "missing", "validate").stderr == "0 files: 0 errors, 0 warnings\n"


def test_list_names_both_files_and_the_one_to_remove(specs: Path) -> None:
    """Once for two files, however many devices they share."""
    new = write(specs / "new.json", "0", "1", "2", at_s=NEWER_S)
    old = f"{specs}/old.json"
    done = run(specs, "list")
    assert done.stdout == "v.com/card=2\n"
    assert done.stderr == (
        f'warning: "{old}" and "{new}" both define "v.com/card=0" and 1 more, which resolve '
        f'nowhere: remove "{old}"\nfound 1 CDI devices\n'
    )
    found = json.loads(run(specs, "list", "--json").stdout)
    assert found["conflicts"] == [
        {"remove": old, "keep": new, "names": ["v.com/card=0", "v.com/card=1"]}
    ]


def test_of_three_files_one_is_left(specs: Path) -> None:
    """Who removes what is named has no conflict any more, and has every device."""
    for name, at_s in (("new", NEWER_S), ("older", OLDER_S - 1)):
        write(specs / f"{name}.json", "0", "1", at_s=at_s)
    found = json.loads(run(specs, "list", "--json").stdout)
    stale = {conflict["remove"] for conflict in found["conflicts"]}
    assert stale == {f"{specs}/old.json", f"{specs}/older.json"}
    for path in stale:
        os.unlink(path)
    assert run(specs, "list").stdout == "v.com/card=0\nv.com/card=1\n"
