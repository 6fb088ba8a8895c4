# SPDX-License-Identifier: Apache-2.0
"""The incumbent's tool: with the word "hook" it is a hook, without it the command line."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.conftest import Bench, Outcome

TOOL = "nvidia-ctk"
# What the image may set; a hook has none of it.
HOSTILE = {"LD_PRELOAD": "/x.so", "PYTHONPATH": "/x", "HOME": "/x"}
BUILDS = ["plain", "twin"]


@pytest.fixture
def directory(bench: Bench, tmp_path: Path) -> Path:
    """Return the directory of a launcher that has the tool's command line beside it."""
    shutil.copy(bench.workshop.build("plain") / "launcher", tmp_path / "launcher")
    shutil.copy(bench.path("recorder"), tmp_path / TOOL)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / TOOL).symlink_to("../launcher")
    return tmp_path


def start(bench: Bench, name: str, *words: str, build: str = "plain") -> Outcome:
    """Start the launcher of *build* as the tool, by *name*, with an image's environment."""
    program = str(bench.workshop.build(build) / "launcher")
    env = {**bench.environment(), **HOSTILE} if build == "plain" else bench.environment()
    return bench.start([name, *words], program=program, env=env)


@pytest.mark.parametrize("name", [TOOL, f"/usr/bin/{TOOL}"])
@pytest.mark.parametrize(
    ("words", "handed_on"),
    [
        (("hook", "create-symlinks", "--link", "a::/b"), ("create-symlinks", "--link", "a::/b")),
        (("hook",), ()),
        (("hook", "hook"), ("hook",)),
        (("--debug", "-q", "hook", "noop"), ("--debug", "-q", "noop")),
        (("--config", "/x", "hook", "noop"), ("--config", "/x", "noop")),
        (("-q", "--config=/x", "hook", "noop"), ("-q", "--config=/x", "noop")),
        (("--debug=true", "hook", "--", "x"), ("--debug=true", "--", "x")),
    ],
)
def test_hooks_are_the_hook_role(
    bench: Bench, name: str, words: tuple[str, ...], handed_on: tuple[str, ...]
) -> None:
    """Specs of old name the tool, without an environment: runc hands it that of the image."""
    outcome = start(bench, name, *words)
    assert outcome.who == "python"
    assert outcome.record.arguments[-len(handed_on) - 1 :] == [
        os.fsencode(word) for word in (name, *handed_on)
    ]
    assert b"hooks.entry" in outcome.record.arguments[7]
    assert outcome.record.environment == [
        b"PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        b"LC_ALL=C.UTF-8",
    ]


@pytest.mark.parametrize(
    "words",
    [
        *((), ("cdi", "list"), ("--quiet", "config"), ("--config", "hook"), ("-d",)),
        *(("config", "hook"), ("Hook",), ("hooks",), ("", "hook")),
    ],
)
def test_all_else_is_the_command_line(
    bench: Bench, directory: Path, words: tuple[str, ...]
) -> None:
    """With arguments and environment as they came, by the name whose defaults it is to have."""
    program = str(directory / "bin" / TOOL)
    env = bench.environment(**HOSTILE)
    outcome = bench.start([program, *words], env=env)
    if words[:1] == ("--config",):
        # The value of an option is not a command; which options take one is unknown.
        assert outcome.who == "python"
        return
    assert outcome.returncode == 0, outcome.stderr
    record = (directory / f"{TOOL}.record").read_bytes()
    assert b"LD_PRELOAD=/x.so" in record
    for word in words:
        assert os.fsencode(word) in record


@pytest.mark.parametrize("build", BUILDS)
def test_without_the_command_line_it_says_so(
    bench: Bench, build: str, request: pytest.FixtureRequest
) -> None:
    """Where we were installed without the incumbent's names, nobody else's tool is started."""
    if build == "twin":
        request.getfixturevalue("twin")
    outcome = start(bench, TOOL, "cdi", "list", build=build)
    assert (outcome.returncode, outcome.who) == (127, None)
    assert outcome.stderr.startswith(b"nvidia-ctk: runtime: cannot execute ")
    assert b"\nhint: install gpuruntime with the incumbent's names" in outcome.stderr


@pytest.mark.parametrize("build", BUILDS)
def test_many_options_in_front_move(
    bench: Bench, build: str, request: pytest.FixtureRequest
) -> None:
    """The word is taken out of the list where that lies."""
    if build == "twin":
        request.getfixturevalue("twin")
    words = ["-d"] * 10_000
    outcome = start(bench, TOOL, *words, "hook", "noop", build=build)
    assert outcome.who == "python"
    assert outcome.record.arguments[-10_002:] == [
        TOOL.encode(), *(word.encode() for word in words), b"noop"
    ]  # fmt: skip
