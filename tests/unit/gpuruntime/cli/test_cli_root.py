# SPDX-License-Identifier: Apache-2.0
"""Options in front of the command, as the incumbent's tool has them and its packages use them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import forked_cli
import pytest
from click.testing import CliRunner

from gpuruntime import __version__
from gpuruntime.cli.lazy import variables_of
from gpuruntime.cli.main import VARIABLES, root

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

PROGRAM = Path(sys.executable).with_name("gpuruntime")


def call(*words: str, **environment: str) -> tuple[int, str, str]:
    """Return status, output and errors of the command line."""
    done = forked_cli.run(*words, env={**os.environ, **environment})
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
    assert status == 2
    assert errors.startswith('error: configuration: invalid config option "none-such"')
    status, _, errors = call("--quiet", "cdi", "list", "--none-such")
    assert status == 2
    assert "No such option" in errors


@pytest.mark.parametrize("option", ["-d", "--debug", "--debug=true", ""])
def test_debug_prints_what_is_read(specs: list[str], option: str) -> None:
    """By the option or its variables; the output is as without it."""
    environment = {} if option else {"NVIDIA_CTK_DEBUG": "true"}
    status, output, errors = call(*filter(None, [option]), *specs, **environment)
    plain = call(*specs)
    assert (status, output) == plain[:2]
    traced = [line for line in errors.splitlines() if line.startswith("debug: ")]
    assert re.fullmatch(r"debug: [0-9:]{8} gpuruntime [0-9.]+, Python [0-9.]+ at /.*", traced[0])
    assert any(line.endswith(f'open "{specs[-1]}"') for line in traced)
    assert any("bad.json" in line for line in traced)
    assert not any(".pyc" in line for line in traced)
    rest = [line for line in errors.splitlines() if line not in traced]
    assert rest == plain[2].splitlines()
    # --quiet wins, and a false value is none.
    assert call("--quiet", "--debug", *specs) == (0, "", "")
    assert call("--debug=0", *specs) == plain


@pytest.mark.parametrize("option", ["--version", "-v"])
def test_the_version_is_what_scripts_look_for(tmp_path: Path, option: str) -> None:
    """Under the incumbent's name, its words come first."""
    ours = f"gpuruntime, version {__version__}\n"
    assert call(option) == (0, ours, "")
    program = tmp_path / "nvidia-ctk"
    program.symlink_to(PROGRAM)
    done = subprocess.run([program, option], capture_output=True, text=True, check=True)
    assert done.stdout == f"NVIDIA Container Toolkit CLI version {__version__}\n{ours}"
    # Its usage has its name.
    done = subprocess.run([program, "--x"], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Usage: nvidia-ctk [OPTIONS] ")


def leaves(command: click.Command, words: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the words of each command and group, with those of its parents."""
    yield list(words)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from leaves(child, (*words, name))


@pytest.mark.parametrize("words", [*leaves(root, ())], ids=" ".join)
def test_help_has_every_variable(words: list[str]) -> None:
    """Those of its options; and those of every command, or where to find them."""
    runner = CliRunner()
    text = runner.invoke(root, [*words, "--help"]).output
    context = click.Context(root)
    command: click.Command = root
    for word in words:
        assert isinstance(command, click.Group)
        child = command.get_command(context, word)
        assert child is not None
        command = child
    for parameter in command.params:
        for name in variables_of(parameter):
            assert re.search(rf"(?m)^    {name} +--[a-z.-]+$", text)
    if not words:
        for name in VARIABLES:
            assert re.search(rf"(?m)^    {name}  +\w", text)
    elif not isinstance(command, click.Group):
        assert '"gpuruntime --help" lists the environment variables' in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--format", "x"], {}, "Invalid value for '--format': 'x' is not"),
        (
            [],
            {"NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT": "x"},
            "from the environment variable NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT: 'x' is not",
        ),
        (
            [],
            {"GPURUNTIME_CDI_FORMAT": "x", "NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT": "y"},
            "from the environment variable GPURUNTIME_CDI_FORMAT: 'x' is not",
        ),
    ],
)
def test_a_usage_error_names_where_the_value_is_from(
    words: list[str], environment: dict[str, str], said: str
) -> None:
    """And no variable that has no part in it."""
    status, _, errors = call("cdi", "generate", *words, **environment)
    assert status == 2
    assert said in errors
    assert "env var" not in errors


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


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_config_file_that_does_not_exist_is_an_error(
    tmp_path: Path, *, by_variable: bool
) -> None:
    """The next file of the search would be in force instead, and nothing would say so."""
    path = tmp_path / "config.toml"
    other = tmp_path / "other.toml"
    other.write_text("disable-require = true\n")
    environment = {"NVIDIA_CTK_CONFIG_FILE_PATH": str(other)}
    front = ["--config", str(path)]
    if by_variable:
        front, environment["NVIDIA_CTK_CONFIG"] = [], str(path)
    status, output, errors = call(*front, "cdi", "list", **environment)
    assert (status, output) == (2, "")
    assert f'the config file "{path}" does not exist' in errors
    # The command `config` creates it, and does not take the other one for it.
    assert "disable-require = false\n" in call(*front, "config", **environment)[1]
    assert call(*front, "config", "--in-place", **environment)[0] == 0
    assert "disable-require = false\n" in path.read_text()
    assert other.read_text() == "disable-require = true\n"
    assert call(*front, "cdi", "list", **environment)[0] == 0


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
