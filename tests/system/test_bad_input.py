# SPDX-License-Identifier: Apache-2.0
"""Bad input to a create: one line and a hint, nothing changed, runc not started, no hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scenarios import bad_input
from scenarios.machine import SIMHOST, TREE

pytestmark = pytest.mark.system
PROGRAM = TREE / "tests" / "scenarios" / "bad_input.py"
PHASES = "configuration|request|bundle|device|spec|runtime"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return what every case came to, on one simulated host."""
    command = [sys.executable, str(SIMHOST), "run", "--", sys.executable, str(PROGRAM)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=170, stdin=subprocess.DEVNULL
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def last_message(log: list[str], log_format: str) -> tuple[str, str]:
    """Return level and message of the last record of an engine's log."""
    if log_format == "json":
        record = json.loads(log[-1])
        assert set(record) == {"level", "msg", "time"}
        return record["level"], record["msg"]
    match = re.fullmatch(r'time="[^"]+" level=(\w+) msg=("(?:[^"\\]|\\.)*")', log[-1])
    assert match, log[-1]
    return match[1], json.loads(match[2])


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("name", [case.__name__ for case in bad_input.CASES])
def test_bad_input_is_one_line_and_a_hint(
    results: dict[str, Any], name: str, log_format: str
) -> None:
    """The engine's user reads what was wrong and what to do; nothing was half done."""
    seen = results[name][log_format]
    expected = {"no_runc": 127, "no_runc_anywhere": 127, "runc_of_another_machine": 126}.get(
        name, 1
    )
    assert seen["status"] == expected, seen
    assert seen["stdout"] == ""
    assert re.fullmatch(
        rf"gpu-container-runtime: (?:{PHASES}): [ -~]+\nhint: [ -~]+\n", seen["stderr"]
    ), seen["stderr"]
    assert "Traceback" not in seen["stderr"]
    assert "this is a bug" not in seen["stderr"]
    assert last_message(seen["log"], log_format) == ("error", seen["stderr"].rstrip("\n"))
    assert not seen["started"]
    if name != "runc_of_another_machine":
        assert seen["untouched"]
    assert seen["left"] in (["config.json"], [])
    assert seen["seconds"] < 20


@pytest.mark.parametrize("name", [case.__name__ for case in bad_input.WORKING])
def test_what_is_not_bad_reaches_runc(results: dict[str, Any], name: str) -> None:
    """The control of the tests above, and what must not be refused."""
    seen = results[name]["json"]
    assert seen["status"] == 0, seen
    assert seen["started"]
    assert seen["stderr"] == ""
    assert seen["untouched"] is (name in bad_input.UNCHANGED)
    assert seen["left"] == ["config.json"]


def test_a_broken_spec_is_named_in_a_warning(results: dict[str, Any]) -> None:
    """The operator must learn why a file in the directory has no effect."""
    log = "".join(results["broken_spec_beside"]["json"]["log"])
    for name in ("broken.json", "broken.yaml", "fifo.json"):
        assert f"/etc/cdi/{name}" in log


def test_an_unknown_key_is_a_warning_with_the_nearest_known(results: dict[str, Any]) -> None:
    """A misspelled key must not be silent, and must not keep containers from starting."""
    log = "".join(results["unknown_key_in_toml"]["json"]["log"])
    assert "log-levle" in log
    assert "nvidia-container-runtime.log-level" in log


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpu_9_of_8", '"nvidia.com/gpu=9"'),
        ("unknown_uuid", "GPU-00000000-1111-2222-3333-444444444444"),
        ("no_runc", "/no/such/runc"),
        ("broken_spec_alone", "/etc/cdi/nvidia.json"),
        ("device_of_a_broken_spec", "/etc/cdi/card.json"),
        ("no_runc_anywhere", '"runc", "crun"'),
        ("untrusted_spec", "other than root"),
        ("two_specs_of_one_kind", "/etc/cdi/other.json"),
        ("spec_names_a_missing_node", "/dev/nvidia-missing"),
        ("config_duplicate_key", '"hooks"'),
        ("config_invalid_utf8", "UTF-8"),
        ("config_other_case", '"HOOKS"'),
        ("config_toml_broken", "config.toml"),
        ("mode_not_there", "tegra"),
    ],
)
def test_the_message_names_what_is_wrong(results: dict[str, Any], name: str, wanted: str) -> None:
    """A message that names neither file nor device sends the operator searching."""
    assert wanted in results[name]["json"]["stderr"]


@pytest.mark.parametrize("log", ["missing/log", "fifo", "directory"])
def test_a_log_that_cannot_be_written_changes_nothing_else(tmp_path: Path, log: str) -> None:
    """The two lines are on stderr all the same, at once; nothing is made where the log is not."""
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    before = sorted(os.listdir(tmp_path))
    command = [bad_input.RUNTIME, "--log", str(tmp_path / log), "create", "--bundle", "/no/bundle"]
    done = subprocess.run(
        [*command, "one"], capture_output=True, text=True, check=False, timeout=5
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r'gpu-container-runtime: bundle: cannot read "/no/bundle/config.json": [ -~]+\n'
        r"hint: [ -~]+\n",
        done.stderr,
    )
    assert sorted(os.listdir(tmp_path)) == before
