# SPDX-License-Identifier: Apache-2.0
"""Options in front of the command, as the incumbent's tool has them and its packages use them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

PROGRAM = Path(sys.executable).with_name("gpuruntime")


def call(*words: str, **environment: str) -> tuple[int, str, str]:
    """Return status, output and errors of the command line."""
    done = subprocess.run(
        [PROGRAM, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def specs(tmp_path: Path) -> list[str]:
    """Return options of `cdi list` for a directory with a spec that cannot be read."""
    (tmp_path / "bad.json").write_text("{")
    return ["cdi", "list", "--spec-dir", str(tmp_path)]


@pytest.mark.parametrize("option", ["-q", "--quiet", "--quiet=true", "--quiet=T", ""])
def test_quiet_says_nothing_but_errors(specs: list[str], option: str) -> None:
    """Scripts of packages call it so."""
    environment = {} if option else {"NVIDIA_CTK_QUIET": "true"}
    assert call(*filter(None, [option]), *specs, **environment) == (0, "", "")
    # The controls: it has something to say, and errors are said.
    assert "bad.json" in call(*specs)[2]
    assert "bad.json" in call("--quiet=false", *specs)[2]
    status, _, errors = call("--quiet", "config", "--set", "none-such=1")
    assert status == 1
    assert errors.startswith('error: configuration: invalid config option "none-such"')
    status, _, errors = call("--quiet", "cdi", "list", "--none-such")
    assert status == 2
    assert "No such option" in errors


@pytest.mark.parametrize("option", ["-d", "--debug", "--debug=true", "--debug=0"])
def test_debug_is_taken(specs: list[str], option: str) -> None:
    """And changes nothing."""
    assert call(option, *specs) == call(*specs)


@pytest.mark.parametrize("by_variable", [True, False])
def test_config_names_the_file_in_force(tmp_path: Path, *, by_variable: bool) -> None:
    """By the option or the incumbent's variable."""
    path = tmp_path / "config.toml"
    path.write_text('[nvidia-container-runtime]\nmode = "cdi"\n')
    if by_variable:
        found = call("config", NVIDIA_CTK_CONFIG=str(path))
    else:
        found = call("--config", str(path), "config")
    assert found[:2] == (0, path.read_text())


def test_a_switch_may_have_a_value(tmp_path: Path) -> None:
    """`=true` is the switch, `=false` is none; of another option it is the value."""
    path = tmp_path / "config.toml"
    path.write_text("disable-require = true\n")
    file = f"--config-file={path}"
    assert call("config", file, "--set=disable-require=false", "--in-place=false")[1] != ""
    assert path.read_text() == "disable-require = true\n"
    assert call("config", file, "--set=disable-require=false", "--in-place=true")[1] == ""
    assert path.read_text() == "disable-require = false\n"
    status, _, errors = call("config", file, "--in-place=perhaps")
    assert status == 2
    assert "does not take a value" in errors
