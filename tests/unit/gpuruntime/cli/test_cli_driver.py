# SPDX-License-Identifier: Apache-2.0
"""`gpuruntime driver list`: what tools for HPC ask for, without a driver that runs."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver_roots import VERSION, Tree, build, elf

from gpuruntime.request import capabilities

# Each test starts the command line, most of them several times.
pytestmark = pytest.mark.slow

# What the machine of these tests runs.
LAYOUT = {"aarch64": "aarch64"}.get(platform.machine(), "ubuntu")
PROGRAM = """
import sys
from gpuruntime.cli import main
main.COMMANDS.setdefault("driver", ("gpuruntime.cli.driver", "driver", ""))
main.main()
"""


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `gpuruntime driver` with *arguments*."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "driver", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **environ},
    )


def listed(tree: Tree, *arguments: str, **environ: str) -> list[str]:
    """Return the lines of the list, without the root; nothing but a sum on standard error."""
    done = run("list", "--driver-root", str(tree.path), *arguments, **environ)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert done.stderr == f"driver {VERSION}: {len(lines)} files\n"
    return [line.removeprefix(str(tree.path)) for line in lines]


def as_object(tree: Tree, *arguments: str) -> dict[str, Any]:
    """Return what `--json` prints."""
    done = run("list", "--driver-root", str(tree.path), "--json", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Return the root of a driver with everything, that nobody changes."""
    made = build(tmp_path_factory.mktemp("driver") / "root", LAYOUT)
    made.directory("/tmp/nvidia-mps")
    return made


def test_the_list_has_one_path_a_line_kind_by_kind(tree: Tree) -> None:
    """In the incumbent's order: programs, libraries, 32-bit ones, sockets, firmware."""
    lines = listed(tree)
    assert len(lines) == len(set(lines)) > 60
    patterns = {
        "program": r"/usr/bin/nvidia-",
        "library": r"/usr/lib/(?:x86_64|aarch64)-linux-gnu/.*\.so\.",
        "32-bit": r"/usr/lib/(?:i386-linux-gnu|arm-linux-gnueabihf)/.*\.so\.",
        "config": r"/(?:etc|usr/share)/",
        "ipc": r"/tmp/nvidia-mps$",
        "firmware": r"/(?:usr/)?lib/firmware/",
    }
    kinds = [next(kind for kind, p in patterns.items() if re.match(p, line)) for line in lines]
    assert list(dict.fromkeys(kinds)) == list(patterns)
    assert sorted(kinds, key=list(patterns).index) == kinds


def test_capabilities_choose(tree: Tree) -> None:
    """As NVIDIA_DRIVER_CAPABILITIES does for a container; they may be repeated or in a list."""
    utility = listed(tree, "--capability", "utility")
    assert any("libnvidia-ml.so" in line for line in utility)
    assert not any("libcuda.so" in line for line in utility)
    both = listed(tree, "--capability", "utility", "--capability", "compute")
    assert both == listed(tree, "--capability", "utility,compute")
    assert any("libcuda.so" in line for line in both)
    assert set(utility) < set(both) < set(listed(tree))
    assert listed(tree, "--capability", "all") == listed(tree)
    assert listed(tree, GPURUNTIME_DRIVER_CAPABILITIES="utility") == utility


def test_json_is_one_object(tree: Tree) -> None:
    """Whoever wants to know more than a path."""
    found = as_object(tree)
    assert list(found) == ["version", "files", "links", "problems"]
    assert found["version"] == VERSION
    assert found["problems"] == []
    assert [row["path"].removeprefix(str(tree.path)) for row in found["files"]] == listed(tree)
    cuda = next(row for row in found["files"] if row.get("soname") == "libcuda.so.1")
    assert cuda["kind"] == "library"
    assert cuda["capability"] == "compute"
    assert cuda["path"] == f"{tree.path}{cuda['containerPath']}"
    assert {row["capability"] for row in found["files"]} <= {"all", *capabilities.ALL}
    assert any(link.endswith("/libcuda.so.1") for link in found["links"])


def test_what_was_left_out_is_warned_of(tmp_path: Path) -> None:
    """On standard error, in one line each, with no character of a name that a terminal obeys."""
    tree = build(tmp_path / "root", LAYOUT)
    icds = "/usr/share/vulkan/icd.d"
    tree.file(f"{icds}/nvidia\x1b[2J.json", "{}")
    done = run("list", "--driver-root", str(tree.path))
    assert done.returncode == 0
    warning, summary = done.stderr.splitlines()
    assert re.fullmatch(r"warning: [ -~]+\\x1b\[2J\.json[ -~]+", warning)
    assert summary.startswith(f"driver {VERSION}: ")


def test_it_works_without_nvml_s_answer(tree: Tree) -> None:
    """The libraries here would not even load."""
    assert any(line.endswith(f"libnvidia-ml.so.{VERSION}") for line in listed(tree))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--capability", "everything"], '"everything"'),
        (["--driver-root", "/no/such/root"], '"/no/such/root"'),
        (["--driver-root", "EMPTY"], "libnvidia-ml.so.1"),
    ],
)
def test_errors_are_two_lines(arguments: list[str], words: str, tmp_path: Path) -> None:
    """What was wrong, and one thing to do."""
    empty = Tree(tmp_path / "empty")
    done = run("list", *(str(empty.path) if word == "EMPTY" else word for word in arguments))
    assert done.returncode == (2 if words == '"everything"' else 1)
    assert done.stdout == ""
    assert re.fullmatch(r"error: [a-z]+: [ -~]+\nhint: [ -~]+\n", done.stderr), done.stderr
    assert words in done.stderr


def test_a_module_of_another_version_is_an_error(tmp_path: Path) -> None:
    """B036: both versions, and what to do."""
    tree = build(tmp_path / "root", LAYOUT)
    tree.module("550.90.07")
    done = run("list", "--driver-root", str(tree.path))
    assert done.returncode == 1
    assert "550.90.07" in done.stderr
    assert VERSION in done.stderr
    assert "reboot" in done.stderr


def test_search_paths_are_taken(tree: Tree, tmp_path: Path) -> None:
    """B099."""
    snap = Tree(tmp_path / "snap")
    abi = "aarch64" if LAYOUT == "aarch64" else "x86-64"
    for name in ("libcuda", "libnvidia-ml"):
        snap.file(f"/lib/{name}.so.{VERSION}", elf(f"{name}.so.1", abi=abi))
    done = run(
        *("list", "--driver-root", str(tree.path)),
        *("--library-search-path", str(snap.at("/lib"))),
        *("--config-search-path", str(snap.at("/share"))),
    )
    assert done.returncode == 0, done.stderr
    libraries = [line for line in done.stdout.splitlines() if ".so." in line]
    assert libraries == [
        str(snap.at(f"/lib/{name}.so.{VERSION}")) for name in ("libcuda", "libnvidia-ml")
    ]
    assert "/etc/OpenCL" not in done.stdout


def test_help_names_the_capabilities() -> None:
    """Nobody knows them by heart."""
    done = run("list", "--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert ", ".join(capabilities.ALL) in text
    assert "Usage: gpuruntime driver list" in text


def test_standard_output_that_cannot_be_written_is_an_error(tree: Tree) -> None:
    """A pipeline must not take half a list for a whole one."""
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "driver", "list", "--driver-root", str(tree.path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={"PATH": os.defpath},
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_without_an_option_the_driver_root_is_that_of_the_config(tree: Tree) -> None:
    """As with `cdi generate`; the option goes before it, and a broken file is said."""
    config = tree.path.parent / "config.toml"
    config.write_text(f'[nvidia-container-cli]\nroot = "{tree.path}"\n')
    by_option = run("list", "--driver-root", str(tree.path), GPURUNTIME_CONFIG="/nonexistent")
    assert by_option.stdout
    by_config = run("list", GPURUNTIME_CONFIG=str(config))
    assert (by_config.stdout, by_config.returncode) == (by_option.stdout, 0)
    config.write_text('[nvidia-container-cli]\nroot = "/no/such/root"\n')
    assert run("list", GPURUNTIME_CONFIG=str(config)).returncode == 1
    again = run("list", "--driver-root", str(tree.path), GPURUNTIME_CONFIG=str(config))
    assert again.stdout == by_option.stdout
    config.write_text("[[[")
    done = run("list", GPURUNTIME_CONFIG=str(config))
    assert (done.returncode, done.stdout) == (1, "")
    assert "hint: " in done.stderr
