# SPDX-License-Identifier: Apache-2.0
"""LINK-11, TIME-01: the hook ends in time though a file system of the container never answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from scenarios.machine import SCENARIOS

pytestmark = [
    pytest.mark.system("runc"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no /dev/fuse"),
]


def test_link_11_a_silent_fuse_server_does_not_hold_the_hook() -> None:
    """No signal ends a request that the server has read: the runtime must not wait for it."""
    program = [sys.executable, SCENARIOS / "silent_fuse.py"]
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", *program],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    status, seconds, said = json.loads(done.stdout)
    assert status == 1
    assert seconds < 13
    assert "was not done in 10 s" in said
