# SPDX-License-Identifier: Apache-2.0
"""Containers of `run`: steps of a build have GPUs, and a terminal's user has what runc gives."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
from scenarios.machine import SCENARIOS, run_on_host

pytestmark = pytest.mark.system("runc", "gcc")
MASKED = "ModifyDeviceFiles: 0"
LOADED = "load /usr/lib/x86_64-linux-gnu/libcuda.so.1"
# What docs/reference/builds.md says stays in an image with some content.
CONTENTS = {
    "etc/ld.so.cache",
    "etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf",
}
# Of runc itself: targets of the mounts that BuildKit has for each step.
ENGINE = {"etc/hosts", "etc/resolv.conf"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return what came of every case."""
    return run_on_host(SCENARIOS / "builds.py")


def gpus(output: str) -> list[int]:
    """Return the minor numbers of the GPUs whose nodes are listed in *output*."""
    return sorted(int(number) for number in re.findall(r"\bnvidia([0-9]+)\b", output))


@pytest.mark.parametrize(
    ("case", "expected"), [("image requests", [0, 2]), ("again", [0, 2]), ("RUN --device", [0])]
)
def test_a_build_step_has_the_gpus_that_it_requests(
    found: dict[str, Any], case: str, expected: list[int]
) -> None:
    """By a variable of the image, also when the launcher repeats it; and by CDI of BuildKit."""
    step = found[case]
    assert step["status"] == 0, step["errors"]
    assert gpus(step["output"]) == expected
    assert LOADED in step["output"]
    assert MASKED in step["output"]


def test_a_build_step_without_a_request_is_unchanged(found: dict[str, Any]) -> None:
    """The control for what a request leaves in an image, and for what the probe shows."""
    step = found["no request"]
    assert step["status"] == 0, step["errors"]
    assert gpus(step["output"]) == []
    assert LOADED not in step["output"]
    assert step["new"].keys() == ENGINE


@pytest.mark.parametrize("case", ["image requests", "again", "RUN --device"])
def test_what_stays_in_an_image_is_documented(found: dict[str, Any], case: str) -> None:
    """Empty targets of mounts, directories, links to them, and two files; nothing is lost."""
    step = found[case]
    with_content = {path for path, kind in step["new"].items() if kind == "file"}
    assert with_content == CONTENTS
    kinds = {kind.partition(" to ")[0] for kind in step["new"].values()}
    assert kinds == {"directory", "empty file", "file", "link"}
    assert step["gone"] == []
    # No byte of the driver.
    assert step["new"]["usr/bin/nvidia-smi"] == "empty file"


def test_a_build_step_without_its_gpu_does_not_run(found: dict[str, Any]) -> None:
    """It fails in front of runc, as a create does."""
    step = found["missing GPU"]
    assert step["status"] == 1
    assert 'there is no device "99"' in step["errors"]
    assert step["new"] == {}


@pytest.mark.parametrize(
    ("case", "status", "word"), [("Ctrl-C", 41, "interrupted"), ("SIGTERM", 42, "ended")]
)
def test_a_terminal_and_signals_are_those_of_runc(
    found: dict[str, Any], case: str, status: int, word: str
) -> None:
    """The process that was started is runc: it has the terminal, and hands signals on."""
    seen = found[case]
    assert seen["program"] == "runc"
    lines = seen["output"].split("\n")
    assert lines[0] == "terminal"
    assert lines[-2].endswith(word)
    assert gpus(seen["output"]) == [1]
    assert seen["status"] == status


def test_an_interrupt_before_runc_is_one(found: dict[str, Any]) -> None:
    """No traceback, no changed config.json, no temporary file, and the status of the signal."""
    assert found["early"] == {
        "status": -signal.SIGINT,
        "output": "",
        "changed": False,
        "left": [],
    }
