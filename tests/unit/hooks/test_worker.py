# SPDX-License-Identifier: Apache-2.0
"""TIME-01: a worker that nothing ends is left, and whoever called the hook does not wait for it.

As one whose file system does not answer; tests/system has that with FUSE.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import hook_program
import pytest

# The work neither hears the alarm nor ends; it says what it holds, in the container's root.
ENDLESS = """
import os, signal, time
from gpuruntime.system import ops, syscalls
def execute(self, root, warn):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.symlink(os.readlink("/proc/self/fd/" + fd), fd, dir_fd=root.fd)
        except FileNotFoundError:
            # What listed them.
            pass
    os.symlink(str(os.getpid()), "pid", dir_fd=root.fd)
    time.sleep(20)
ops.MaskParams.execute = execute
# It is not confined.
ops.MaskParams.ldconfig = "x"
syscalls.die_with_parent = lambda: None
"""
# No signal ends the worker, and it does not end with the launcher.
NOTHING_ENDS_IT = {
    "call(SYS_kill, -worker->pid, SIGKILL, 0, 0, 0);": "",
    "call(SYS_kill, worker->pid, SIGKILL, 0, 0, 0);": "",
    "call(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);": "",
}
# A worker that has the caller's standard error.
HOLDS = {"call(SYS_dup3, error[1], 2, 0, 0, 0);": ""}


def start(work: Path, weak: Mapping[str, str], patience: float = 15) -> tuple[float, str]:
    """Return after how long the caller's pipes had an end, and what was said."""
    (work / "rootfs").mkdir()
    (work / "config.json").write_text('{"root": {"path": "rootfs"}}')
    program = hook_program.make(work / "hook", ENDLESS, changes={**NOTHING_ENDS_IT, **weak})
    start = time.monotonic()
    with subprocess.Popen(
        [program, "--deadline=1", "update-container", "--mask-params"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as hook:  # fmt: skip
        try:
            said, _ = hook.communicate(json.dumps({"bundle": str(work)}), timeout=patience)
        except subprocess.TimeoutExpired:
            said = ""
        seconds = time.monotonic() - start
        # The worker that was left.
        os.kill(int(os.readlink(work / "rootfs/pid")), 9)
    return seconds, said


@pytest.mark.slow
def test_the_caller_waits_for_no_child(tmp_path: Path) -> None:
    """It reads until nobody holds its pipes any more, as runtimes do."""
    seconds, said = start(tmp_path, {})
    assert 0.9 < seconds < 14
    assert "was not done in 1 s" in said
    held = {path.name: os.readlink(path) for path in (tmp_path / "rootfs").iterdir()}
    assert held["1"] == "/dev/null"
    # Its own, to the launcher; standard input is the state's, whose end has been read.
    pipes = {name for name, target in held.items() if target.startswith("pipe:")}
    assert pipes == {"0", "2"}


@pytest.mark.slow
def test_control_a_worker_that_holds_standard_error(tmp_path: Path) -> None:
    """The weak hook ends in time as well, and the caller waits on."""
    seconds, said = start(tmp_path, HOLDS, patience=3)
    assert seconds > 2.9
    assert said == ""
