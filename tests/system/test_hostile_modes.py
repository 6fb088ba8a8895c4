# SPDX-License-Identifier: Apache-2.0
"""LINK-01, LINK-11, REQ-10: the mode of what is not the container's stays as it is.

Each case in a mount namespace of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile import cases

pytestmark = [
    pytest.mark.system("unshare", "mount"),
    pytest.mark.catalogue("LINK-01", "LINK-11", "REQ-10"),
]
OTHERS = {
    "link": "is a link",
    "volume": "is on a mount of the host's",
    "tmpfs of the host": "is on a mount of the host's",
    "tmpfs beside the root": "is on a mount of the host's",
    "file of the host": "is on a mount of the host's",
}


def play(work: Path, kind: str, way: str) -> dict[str, Any]:
    """Return what came of one case."""
    return cases.play("modes.py", work / "work", kind, way)


@pytest.mark.parametrize("way", ["OPENAT2", "WALK"])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_others_have_as_well_keeps_its_mode(tmp_path: Path, kind: str, way: str) -> None:
    """`--volume /dev:/dev` would open a device of the host to everybody; one line says so."""
    seen = play(tmp_path, kind, way)
    assert seen["mode"] == 0o700
    assert seen["warnings"] == [f'"/dev/dri" in the container {OTHERS[kind]}, and keeps its mode']


@pytest.mark.parametrize("way", ["OPENAT2", "WALK"])
@pytest.mark.parametrize("kind", ["directory", "own tmpfs"])
def test_the_container_s_own_gets_it(tmp_path: Path, kind: str, way: str) -> None:
    """The /dev of a container is a mount too, which nobody else has."""
    assert play(tmp_path, kind, way) == {"mode": 0o777, "warnings": []}


@pytest.mark.parametrize("kind", OTHERS)
def test_control_by_its_path_it_is_changed(tmp_path: Path, kind: str) -> None:
    """The weak hook joins root and path."""
    assert play(tmp_path, kind, "STRING")["mode"] == 0o777
