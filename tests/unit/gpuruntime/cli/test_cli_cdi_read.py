# SPDX-License-Identifier: Apache-2.0
"""`cdi list` and `cdi inject`, as programs: output, errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import forked_cli
import pytest
from conformance import cases

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[4]
CORPUS = cases.read(TREE / "tests/data/cdi")
INJECT = {
    name: case for name, case in CORPUS.items() if case["op"] == "inject" and "calls" not in case
}


def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime cdi` with *arguments*."""
    return forked_cli.run("cdi", *arguments, given=stdin, env={**os.environ, **environ})


def spec(kind: str, *devices: str, **members: Any) -> dict[str, Any]:
    """Return a spec of *kind*."""
    entries = [{"name": d, "containerEdits": {"env": [f"D={d}"]}} for d in devices]
    return {"cdiVersion": "0.5.0", "kind": kind, "devices": entries, **members}


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """Return two spec directories: a conflict, a shadowed device, a broken file."""
    files = {
        "low/one.json": spec("v.com/c", "a", "b"),
        "low/two.json": spec("v.com/c", "b", "d"),
        "high/three.json": spec("v.com/c", "a"),
        "high/broken.json": {"cdiVersion": "0.5.0", "kind": "v.com/c", "devices": []},
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0o755)
        path.write_text(json.dumps(content))
        path.chmod(0o644)
    return tmp_path


def dirs(specs: Path) -> list[str]:
    """Return the options that name both directories."""
    return ["--spec-dir", str(specs / "low"), "--spec-dir", str(specs / "high")]


def test_list_prints_names_and_warns_of_the_rest(specs: Path) -> None:
    """Names are data, why others are missing is talk."""
    ran = run("list", *dirs(specs))
    assert (ran.returncode, ran.stdout) == (0, "v.com/c=a\nv.com/c=d\n")
    warnings = ran.stderr.splitlines()
    assert f'"{specs}/high/broken.json" is not used: no-devices' in warnings[0]
    assert 'both define "v.com/c=b", which resolve nowhere: remove' in warnings[1]
    assert f'"{specs}/low/one.json" and "{specs}/low/two.json"' in warnings[1]
    assert warnings[2] == "found 2 CDI devices"


def test_list_verbose_shows_the_file_that_wins(specs: Path) -> None:
    """And what it stands in place of."""
    ran = run("list", "--verbose", *dirs(specs))
    assert ran.stdout == (
        f"v.com/c=a\n  file {specs}/high/three.json\n  in place of {specs}/low/one.json\n"
        f"  env D=a\nv.com/c=d\n  file {specs}/low/two.json\n  env D=d\n"
    )


def test_list_json(specs: Path) -> None:
    """The same for programs."""
    found = json.loads(run("list", "--json", *dirs(specs)).stdout)
    assert [device["name"] for device in found["devices"]] == ["v.com/c=a", "v.com/c=d"]
    assert found["devices"][0]["shadows"] == [f"{specs}/low/one.json"]
    assert [name["name"] for name in found["unresolved"]] == ["v.com/c=b"]
    assert (found["vendors"], found["classes"]) == (["v.com"], ["c"])
    errors = {Path(f["path"]).name: f["error"] and f["error"]["category"] for f in found["files"]}
    assert errors == {
        "one.json": None,
        "two.json": None,
        "three.json": None,
        "broken.json": "no-devices",
    }


@pytest.mark.parametrize("variable", ["GPURUNTIME_CDI_SPEC_DIRS", "NVIDIA_CTK_CDI_SPEC_DIRS"])
def test_directories_from_the_environment(specs: Path, variable: str) -> None:
    """The incumbent's variable too; an option goes before."""
    both = {variable: f"{specs}/low,{specs}/high"}
    assert run("list", **both).stdout == "v.com/c=a\nv.com/c=d\n"
    assert run("list", "--spec-dir", f"{specs}/high", **both).stdout == "v.com/c=a\n"
    ran = run("list", **{variable: ""})
    assert ran.returncode == 2
    assert "hint: " in ran.stderr


def test_untrusted_directories_only_when_allowed(specs: Path) -> None:
    """A directory that others can write is read by nobody's mistake."""
    (specs / "high").chmod(0o777)
    ran = run("list", "--spec-dir", f"{specs}/high")
    assert ran.stdout == ""
    assert "untrusted" in ran.stderr
    ran = run("list", "--allow-untrusted-spec-dirs", "--spec-dir", f"{specs}/high")
    assert ran.stdout == "v.com/c=a\n"


def test_inject_prints_the_new_config_and_keeps_what_it_does_not_know(specs: Path) -> None:
    """A config may have members of a later OCI version."""
    config = {"ociVersion": "9.9", "x": {"y": [1, None]}, "process": {"env": ["A=b"], "z": 1}}
    ran = run("inject", *dirs(specs), "--device", "v.com/c=a", stdin=json.dumps(config))
    assert ran.returncode == 0
    assert json.loads(ran.stdout) == {
        **config,
        "process": {"env": ["A=b", "D=a"], "z": 1},
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("v.com/c=b", "defined more than once in one directory"),
        ("v.com/c=x", 'no spec defines it; of kind "v.com/c" there are v.com/c=a, v.com/c=d'),
        ("v.com/x=a", 'no spec is of kind "v.com/x"; there are v.com/c'),
        ("nvidia", "not a qualified device name"),
        ("v.com/c=a:rwm", "no spec defines it"),
    ],
)
def test_an_unresolved_name_is_explained(specs: Path, name: str, why: str) -> None:
    """Engines only say that it does not resolve."""
    ran = run("inject", "--json", *dirs(specs), "--device", name, "--device", name, stdin="{}")
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    assert (found["error"], found["stage"]) == ("unresolvable", "resolve")
    assert found["unresolved"] == [name, name]
    assert why in found["message"]
    assert "broken.json" in found["message"] or "once" in why or "not a qualified" in why
    assert f'error: device: cannot resolve "{name}"' in ran.stderr


@pytest.mark.parametrize(
    "config",
    [
        *("", "[]", "nonsense", '{"process": 7}', '{"a": 1, "a": 2}', '{"mounts": [1]}'),
        *('{"linux": {"devices": {}}}', '{"Process": {}}', '{"process": {"env": "A=b"}}'),
        *("[" * 9999, "\0"),
    ],
)
def test_a_config_that_is_none_is_refused(specs: Path, config: str) -> None:
    """Nothing is printed but the reason."""
    ran = run("inject", "--json", *dirs(specs), "--device", "v.com/c=a", stdin=config)
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    assert (found["error"], found["stage"]) == ("oci-config", "config")
    assert "Traceback" not in ran.stderr
    plain = run("inject", *dirs(specs), "--device", "v.com/c=a", stdin=config)
    assert (plain.returncode, plain.stdout) == (1, "")


@pytest.mark.parametrize("name", sorted(INJECT)[:: max(1, len(INJECT) // 60)])
def test_the_corpus_through_the_command(name: str, tmp_path: Path) -> None:
    """The command ends as the library does: config, or category, stage and names."""
    case = INJECT[name]
    cases.load(case, tmp_path)
    options = []
    for directory in sorted(tmp_path.iterdir()):
        options += ["--spec-dir", str(directory)]
    for device in case["devices"]:
        options += ["--device", device]
    ran = run("inject", "--json", *options, stdin=json.dumps(case["oci"]))
    found = json.loads(ran.stdout)
    expected = case["expect"]
    if "error" not in expected:
        assert ran.returncode == 0
        assert cases.normalised(found) == expected["oci"]
        return
    assert ran.returncode == 1
    assert (found["error"], found["stage"]) == (expected["error"], expected["stage"])
    if expected["stage"] != "inject":
        assert found["unresolved"] == expected.get("unresolved", found["unresolved"])
