# SPDX-License-Identifier: Apache-2.0
"""TIME-01: how long a hook has, from the config file to its arguments."""

from __future__ import annotations

import pytest

from gpuruntime import config as settings
from gpuruntime.model import Driver, Library
from gpuruntime.plan import from_inventory, gpu_edits
from hooks import entry, options, update_container

PATH = "/usr/lib64/libcuda.so.550.1"
DRIVER = Driver(
    version="550.1",
    libraries=(Library(host_path=PATH, container_path=PATH, soname="libcuda.so.1", abi="x86-64"),),
    files=(),
)


@pytest.mark.parametrize(
    ("path", "deadline_s", "front", "timeout"),
    [
        ("/bin/gpu-cdi-hook", 10, ["gpu-cdi-hook"], 30),
        ("/bin/gpu-cdi-hook", 5, ["gpu-cdi-hook", "--deadline=5"], 30),
        ("/bin/gpu-cdi-hook", 600, ["gpu-cdi-hook", "--deadline=600"], 620),
        # The incumbent's have none.
        ("/bin/nvidia-cdi-hook", 20, ["nvidia-cdi-hook"], 40),
        ("/bin/nvidia-ctk", 20, ["nvidia-ctk", "hook"], 40),
    ],
)
@pytest.mark.parametrize("separate", [False, True])
def test_time_01_the_deadline_of_hooks(
    path: str, deadline_s: int, front: list[str], timeout: int, separate: bool
) -> None:
    """The runtime's own limit is behind it: then the hook says what went wrong."""
    style = gpu_edits.Style(path, separate=separate, deadline_s=deadline_s)
    for hook in gpu_edits.common_edits(DRIVER, (), (), style)["hooks"]:
        assert hook["args"][: len(front)] == front
        assert not hook["args"][len(front)].startswith("-")
        assert hook["timeout"] == timeout


@pytest.mark.parametrize(("value", "seconds"), [(1, 1), (10, 10), (600, 600), (10**9, 600)])
def test_time_01_the_deadline_that_is_configured(value: int, seconds: int) -> None:
    """A hook takes it, whatever the file has."""
    config = settings.Config({"hook-deadline": value}, "/x")
    style = from_inventory.style(config, "/bin/gpu-cdi-hook")
    assert (style.deadline_s, from_inventory.hook_deadline(config)) == (seconds, seconds)
    (hook,) = gpu_edits.common_edits(DRIVER, (), (), style)["hooks"]
    if seconds != gpu_edits.HOOK_DEADLINE_S:
        front, rest = options.split_global(hook["args"][1:])
        assert entry.read_deadline(update_container.read([*front, *rest[1:]])) == seconds
        assert rest == hook["args"][2:]
    assert (gpu_edits.HOOK_DEADLINE_S, gpu_edits.MAX_HOOK_DEADLINE_S) == (
        entry.DEADLINE_S,
        entry.MAX_DEADLINE_S,
    )
