# SPDX-License-Identifier: Apache-2.0
"""NS-03: what the host's ldconfig can write, of a container that has mounts below its root.

Each case in a mount namespace of its own; tests/system/test_host_ldconfig.py has the other limits.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import cases

pytestmark = pytest.mark.system("unshare", "mount", "gcc")
HOSTILE = Path(__file__).parents[3] / "hostile"
# What is mounted on the directory that the program tries to write to.
MOUNTS = {
    "none": "true",
    "tmpfs": "mount -t tmpfs tmpfs etc",
    "volume": "mount --bind ../volume etc",
    "shared": "mount -t tmpfs tmpfs etc; mount --make-shared etc",
    "two": "mount -t tmpfs tmpfs etc; mount -t tmpfs tmpfs etc",
    "below another": "mount --bind . .; cd .; mount -t tmpfs tmpfs etc",
}
SCRIPT = 'set -e; cd "$1"; shift; MOUNT; touch etc/mine; "$@"; ls etc >&2'


@pytest.fixture(scope="module")
def pretender(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a program that says what it may do in ldconfig's place."""
    return cases.build_pretender(tmp_path_factory.mktemp("program"))


def play(work: Path, kind: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Run *command* on a root with a mount of *kind*; what its /etc has then is the error."""
    root = work / "root"
    for directory in (root / "etc", root / "proc", work / "volume"):
        directory.mkdir(parents=True)
    script = SCRIPT.replace("MOUNT", MOUNTS[kind])
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", script, "sh", root,
         *command],
        capture_output=True, text=True, check=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("kind", MOUNTS)
def test_no_mount_below_the_root_can_be_written(tmp_path: Path, pretender: str, kind: str) -> None:
    """A volume is of the host, or of another container."""
    command = (sys.executable, HOSTILE / "sandboxed.py", tmp_path / "root", pretender, "5")
    done = play(tmp_path, kind, *command)
    seen = json.loads(done.stdout)
    assert seen["refused"] == ""
    assert seen["text"] == "seen environ=0 fds=3 write=EROFS mkdir=EROFS self=ENOENT call=none"
    assert done.stderr == "mine\n"


@pytest.mark.parametrize("kind", MOUNTS)
def test_control_the_same_program_without_a_sandbox(
    tmp_path: Path, pretender: str, kind: str
) -> None:
    """It writes there."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copy(pretender, root)
    done = play(tmp_path, kind, "/usr/sbin/chroot", root, "/ldconfig", "/output")
    assert done.stderr == "mine\nnew\n"
    assert " write=done" in (root / "output").read_text()
