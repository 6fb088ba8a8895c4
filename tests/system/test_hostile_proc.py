# SPDX-License-Identifier: Apache-2.0
"""PROC-02: a /proc that is none, or has something over it, and one that shows less.

Each case in a mount namespace of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile import cases

pytestmark = [pytest.mark.system("unshare", "mount"), pytest.mark.catalogue("PROC-02")]


def play(work: Path, kind: str, how: str = "ours") -> dict[str, Any]:
    """Return what came of one case."""
    return cases.play("proc.py", work / "work", kind, how)


@pytest.mark.parametrize("how", ["ours", "walk"])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fake", 'fstatfs("/proc"), which is not a procfs'),
        ("fd", 'open "self/fd" of /proc'),
        ("fdinfo", 'open "self/fdinfo" of /proc'),
        ("mountinfo", 'open "self/mountinfo" of /proc'),
        ("fd,fdinfo", 'open "self/fd" of /proc'),
    ],
)
def test_what_is_no_proc_is_refused(tmp_path: Path, kind: str, why: str, how: str) -> None:
    """Behind the number of a descriptor would be a file of somebody else."""
    seen = play(tmp_path, kind, how)
    assert seen["status"] == 1
    assert f"bundle: the hook cannot be sure of its descriptors: {why}" in seen["error"]
    assert len(seen["error"].splitlines()) == 2
    assert "\nhint: " in seen["error"]
    assert (seen["secret"], seen["victim"]) == (0o700, 0o700)


@pytest.mark.parametrize("kind", ["fake", "fd,fdinfo"])
def test_control_who_believes_it_changes_the_host(tmp_path: Path, kind: str) -> None:
    """The weak hook has the same work, and does it on another file."""
    seen = play(tmp_path, kind, "naive")
    assert (seen["secret"], seen["victim"]) == (0o700, 0o755)


@pytest.mark.parametrize("how", ["ours", "walk"])
@pytest.mark.parametrize("kind", ["usual", "hidepid=2"])
def test_what_others_may_not_see_is_not_needed(tmp_path: Path, kind: str, how: str) -> None:
    """The hook looks at itself alone."""
    seen = play(tmp_path, kind, how)
    assert (seen["status"], seen["error"]) == (0, "")
    assert (seen["secret"], seen["victim"]) == (0o755, 0o700)


def test_a_proc_of_processes_alone_cannot_say_what_to_mask(tmp_path: Path) -> None:
    """The container's own would show that the driver may make nodes."""
    seen = play(tmp_path, "subset=pid")
    assert seen["status"] == 1
    assert 'mount: cannot mask "/proc/driver/nvidia/params" in the container' in seen["error"]
    assert "\nhint: " in seen["error"]
