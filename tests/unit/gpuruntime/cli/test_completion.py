# SPDX-License-Identifier: Apache-2.0
"""Shell completion: which values it has, that it queries no driver, and that errors are silent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import forked_cli
import pytest

from gpuruntime.cli import completion, container_cli, spec_dirs
from gpuruntime.cli.main import COMMANDS, COMPLETE_VARIABLE, root
from gpuruntime.configfile import option_table

PROGRAM = Path(sys.executable).with_name("gpuruntime")


def complete(
    *words: str, program: Path = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Return what the completion script of bash gets for the last of *words*."""
    variables = {
        **os.environ,
        COMPLETE_VARIABLE: "bash_complete",
        "COMP_WORDS": " ".join([program.name, *words]),
        "COMP_CWORD": str(len(words)),
        **environment,
    }
    if program == PROGRAM:
        return forked_cli.run(env=variables)
    return subprocess.run(
        [program], capture_output=True, text=True, check=False, timeout=30, env=variables
    )


def values(*words: str, **environment: str) -> list[str]:
    """Return the completions of the last of *words*, of a call without messages."""
    done = complete(*words, **environment)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def commands(command: click.Command) -> Iterator[click.Command]:
    """Yield *command* and its commands."""
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child)


def test_every_row_of_the_table_is_attached() -> None:
    """A row whose command or option has another name would be silent."""
    attached = {
        (str(command.name), str(name))
        for top in (root, container_cli.root)
        for command in commands(top)
        for parameter in command.params
        if isinstance(parameter.type, completion.CompletedString)
        for name in (*parameter.opts, parameter.metavar)
    }
    assert set(completion.VALUES) <= attached


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("",), sorted(COMMANDS)),
        (("config", "s"), ["set", "show"]),
        (("hook", "update-l"), ["update-ldcache"]),
        (("runtime", "configure", "--runtime", "cr"), ["crio"]),
        (("doctor", "--check", "conf"), ["config"]),
        (("doctor", "--check", "config,nod"), ["config,nodes"]),
        (("cdi", "generate", "--mode", "n"), ["nvml", "nvswitch"]),
        (("cdi", "refresh", "--device-name-strategy", "u"), ["uuid"]),
        (("cdi", "generate", "--format", "y"), ["yaml"]),
        (("explain", "--mode", ""), ["auto", "cdi", "csv", "jit-cdi", "legacy"]),
        (("config", "set", "missing"), [f"missing-gpu={v}" for v in ("", "error", "warn")]),
        (("config", "--set", "nvidia-ctk"), ["nvidia-ctk.path="]),
        (("driver", "list", "--capability", "g"), ["graphics"]),
    ],
)
def test_values(words: tuple[str, ...], expected: list[str]) -> None:
    """Names of engines, checks, modes, keys and their values."""
    assert values(*words) == expected


@pytest.mark.slow
def test_every_key_is_completed() -> None:
    """Also those of the incumbent alone."""
    assert {f"{key}=" for key in option_table.BY_KEY} <= set(values("config", "set", ""))


@pytest.mark.slow
def test_devices_are_those_of_specs(tmp_path: Path) -> None:
    """Of the directories that the command reads; a wrong variable is silent."""
    specs = tmp_path / "cdi"
    specs.mkdir(mode=0o755)
    edits = {"env": ["A=b"]}
    devices = [{"name": name, "containerEdits": edits} for name in ("0", "all")]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    (specs / "x.json").write_text(json.dumps(spec))
    words = ("cdi", "inject", "--device", "nvidia")
    variable = spec_dirs.VARIABLES[0]
    found = values(*words, **{variable: str(specs)})
    assert found == ["nvidia.com/gpu=0", "nvidia.com/gpu=all"]
    assert values(*words, **{variable: ","}) == []


SCRIPT = """
import sys
events = []
def see(event, values):
    if event in ("os.fork", "os.posix_spawn", "os.exec", "subprocess.Popen"):
        events.append(event)
    if event == "ctypes.dlopen" and "nvidia" in str(values[0]):
        events.append(values[0])
sys.addaudithook(see)
from gpuruntime.cli import completion
context = parameter = None
for values in set(completion.VALUES.values()):
    completion.CompletedString(values).shell_complete(context, parameter, "")
print(events, "pynvml" in sys.modules)
"""


@pytest.mark.slow
def test_nothing_is_started_and_no_driver_is_queried() -> None:
    """A query can take seconds, and wake a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[] False\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvidia-ctk", "nvidia-container-cli"])
def test_other_names_are_completed(tmp_path: Path, name: str) -> None:
    """By the same variable."""
    program = tmp_path / name
    program.symlink_to(PROGRAM)
    done = complete("in", program=program)
    assert (done.stderr, done.stdout.split()) == ("", ["plain,info"])
