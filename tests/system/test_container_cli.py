# SPDX-License-Identifier: Apache-2.0
"""`nvidia-container-cli info` and `list`, under the incumbent's name, on the simulated host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from shim_host import Host

from gpuruntime import __version__

TREE = Path(__file__).parents[2]

pytestmark = pytest.mark.system()


@pytest.fixture(scope="module")
def printed(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Return command → what it came to, all on one host."""
    program = tmp_path_factory.mktemp("bin") / "nvidia-container-cli"
    program.symlink_to(Path(sys.executable).parent / "gpuruntime")
    commands = (
        *("info", "--load-kmods info --csv", "list", "list --device 1 --libraries --compat32"),
        *("list --device GPU-5f1e0001", "list --ipcs --no-persistenced", "list --device 9"),
        *("list --imex-channel 0", "list --imex-channel x", "configure --pid=1 /x", "--version"),
        "--debug=/proc/self/fd/2 info",
        *("list --mig-config all", "configure --device=1 --device=3 --compute --pid=1 /x"),
    )
    script = "\n".join(
        f'"{program}" {command} >/run/out 2>/run/err && echo 0 || echo "$?"; '
        "cat /run/out; echo ==; cat /run/err; echo ===="
        for command in commands
    )
    options = ("--gpus", "2", "--feature", "imex")
    with Host(*options) as host:
        output = host.shell(script)
    found = {}
    for command, text in zip(commands, output.split("====\n"), strict=False):
        status, _, rest = text.partition("\n")
        out, _, err = rest.partition("==\n")
        found[command] = subprocess.CompletedProcess([command], int(status), out, err)
    return found


def test_info_is_what_scripts_parse(printed: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """Names, their order and the width; one block a GPU."""
    blocks = printed["info"].stdout.split("\n\n")
    assert blocks[0] == "NVRM version:   550.163.01\nCUDA version:   12.4"
    assert len(blocks) == 3
    names = [line.partition(":")[0] for line in blocks[1].splitlines()]
    assert names == [
        *("Device Index", "Device Minor", "Model", "Brand", "GPU UUID", "Bus Location"),
        "Architecture",
    ]
    assert "Bus Location:   00000000:1b:00.0\n" in blocks[2]
    lines = printed["--load-kmods info --csv"].stdout.splitlines()
    assert lines[:3] == ["NVRM version,CUDA version", "550.163.01,12.4", ""]
    assert lines[3].split(",") == names
    assert len(lines) == 6


def test_list_is_everything_in_order(printed: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """Devices, programs, libraries, sockets, firmware; each path once."""
    lines = printed["list"].stdout.splitlines()
    assert len(set(lines)) == len(lines)
    places = [
        next(i for i, line in enumerate(lines) if word in line)
        for word in ("/dev/nvidia0", "/nvidia-smi", "/libcuda.so.", "/gsp_ga10x.bin")
    ]
    assert places == sorted(places)
    assert "/dev/nvidia1" in lines


def test_list_is_what_is_asked_for(printed: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """And no more."""
    chosen = printed["list --device 1 --libraries --compat32"].stdout.splitlines()
    assert "/dev/nvidia1" in chosen
    assert "/dev/nvidia0" not in chosen
    assert any("libcuda.so." in line for line in chosen)
    assert not any("nvidia-smi" in line for line in chosen)
    nodes = printed["list --device GPU-5f1e0001"].stdout.splitlines()
    assert all(line.startswith("/dev/") for line in nodes)
    assert "persistenced" not in printed["list --ipcs --no-persistenced"].stdout
    channel = printed["list --imex-channel 0"].stdout
    assert channel == "/dev/nvidia-caps-imex-channels/channel0\n"
    assert printed["list --mig-config all"].returncode == 0


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("list --device 9", '"9"'),
        ("list --imex-channel x", '"x"'),
        ("configure --pid=1 /x", "NVIDIA_VISIBLE_DEVICES=all "),
        ("configure --device=1 --device=3 --compute --pid=1 /x", "NVIDIA_VISIBLE_DEVICES=1,3 "),
    ],
)
def test_what_cannot_be_had_is_an_error(
    printed: dict[str, subprocess.CompletedProcess[str]], command: str, word: str
) -> None:
    """One line, a hint, nothing on standard output."""
    done = printed[command]
    assert done.returncode == 1
    assert done.stdout == ""
    assert word in done.stderr
    assert done.stderr.count("\n") == 2


def test_it_has_a_version(printed: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """As every program."""
    lines = printed["--version"].stdout.splitlines()
    assert lines[:2] == [f"cli-version: {__version__}", f"lib-version: {__version__}"]
    assert printed["--version"].returncode == 0


def test_debug_is_a_log_file(printed: dict[str, subprocess.CompletedProcess[str]]) -> None:
    """It has which files are read; the output is as without it."""
    log = printed["--debug=/proc/self/fd/2 info"]
    assert log.stdout == printed["info"].stdout
    assert f"debug: {__version__}" not in printed["info"].stderr
    assert re.search(r"(?m)^debug: [0-9:]+ gpuruntime ", log.stderr)
    assert re.search(r'(?m)^debug: [0-9:]+ look at "/usr/lib/.*/libcuda', log.stderr)
