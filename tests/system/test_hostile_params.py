# SPDX-License-Identifier: Apache-2.0
"""The params mask where the image has something else in its place: a mount never leaves the root.

LINK-07 of the attack catalogue, each in a mount namespace of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile import cases

pytestmark = pytest.mark.system("unshare")
KINDS = ["file", "link_out", "directory", "parent_link_out"]


def mask(work: Path, kind: str, way: str) -> dict[str, Any]:
    """Run the program; return what it printed."""
    return cases.play("params.py", work, kind, way)


@pytest.mark.parametrize("way", ["OPENAT2", "WALK"])
@pytest.mark.parametrize("kind", KINDS)
def test_link_07_the_mask_is_inside_or_refused(tmp_path: Path, kind: str, way: str) -> None:
    """Mounted outside, it would be the host's own driver that is changed."""
    seen = mask(tmp_path, kind, way)
    assert seen["outside"] == seen["gone"] == []
    if kind == "directory":
        assert seen["refused"]
        assert seen["inside"] == []
    elif kind == "parent_link_out":
        # Inside the root this link leads to itself.
        assert seen["refused"]
    else:
        assert seen["refused"] == ""
        assert seen["seen"] == "ModifyDeviceFiles: 0\n"
    assert (tmp_path / "outside" / "params").read_text() == "ModifyDeviceFiles: 1\n"


@pytest.mark.parametrize("kind", ["link_out", "parent_link_out"])
def test_link_07_control_a_mount_by_path_is_outside(tmp_path: Path, kind: str) -> None:
    """mount(8) follows the image's links as it follows any."""
    assert mask(tmp_path, kind, "STRING")["outside"] != []
