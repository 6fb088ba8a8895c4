# SPDX-License-Identifier: Apache-2.0
"""RACE-02: a file is covered by mount(2) alone while somebody exchanges its directory.

Each case in a mount namespace of its own. What else is different on kernels that have no other
call is in tests/system/test_hostile_mounts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile import cases

pytestmark = pytest.mark.system("unshare", "mount")
OPEN, MASKED = "ModifyDeviceFiles: 1\n", "ModifyDeviceFiles: 0\n"


def play(work: Path, kind: str, how: str = "ours") -> dict[str, Any]:
    """Return what came of one case."""
    return cases.play("exchanged.py", work / "work", kind, how)


@pytest.mark.parametrize("kind", ["directory", "mount", "mount on a mount", "late"])
def test_what_somebody_exchanged_is_refused(tmp_path: Path, kind: str) -> None:
    """And what is at the name by then stays as it is: it is a volume, of whomever."""
    seen = play(tmp_path, kind)
    assert "which somebody exchanged" in seen["refused"]
    assert seen["gone"] == []
    assert seen["params"] == {"params": OPEN}


def test_what_nobody_exchanged_is_covered(tmp_path: Path) -> None:
    """The directory keeps its other names."""
    seen = play(tmp_path, "nobody")
    assert (seen["refused"], seen["gone"]) == ("", [])
    assert seen["params"] == {"params": MASKED}


def test_control_who_believes_it_unmounts_what_others_have(tmp_path: Path) -> None:
    """And the container starts with what was to be covered."""
    assert play(tmp_path, "mount", "naive")["gone"] != []
    seen = play(tmp_path / "late", "late", "naive")
    assert seen["refused"] == ""
    assert seen["params"] == {"params": OPEN}
