# SPDX-License-Identifier: Apache-2.0
"""What tests see of the machine's own state, and what is left of that: simhost/isolated.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ISOLATED = Path(__file__).parents[1] / "simhost" / "isolated.py"
KUBELET = Path("/var/lib/kubelet")
pytestmark = pytest.mark.system("mount")


def isolated(script: str) -> str:
    """Return what the shell prints for *script*, run by isolated.py."""
    command = [sys.executable, str(ISOLATED), "sh", "-euc", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def volume() -> Iterator[Path]:
    """Return a file of a volume that is mounted below the directory of a kubelet."""
    point = KUBELET / "pods" / "volume"
    point.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "volume", str(point)], check=True)
    (point / "data").write_text("of a pod")
    yield point / "data"
    subprocess.run(["umount", str(point)], check=True)
    for directory in (point, point.parent, KUBELET):
        directory.rmdir()


def test_the_state_of_a_kubelet_is_hidden_and_kept(volume: Path) -> None:
    """The doctor's reports would depend on the machine; a volume is not ours to empty."""
    assert isolated("ls -d /var/lib/kubelet /var/lib/dpkg || true") == "/var/lib/dpkg\n"
    assert volume.read_text() == "of a pod"
