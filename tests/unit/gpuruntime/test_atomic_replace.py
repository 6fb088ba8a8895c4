# SPDX-License-Identifier: Apache-2.0
"""A file is replaced whole, or it is as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpuruntime import atomic_replace


def test_another_file_takes_the_name(tmp_path: Path) -> None:
    """A second name of the old file keeps its content."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    os.link(path, link)
    atomic_replace.replace(
        str(path), str(tmp_path / "new"), b"data", lambda fd: os.fchmod(fd, 0o640)
    )
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"data", 0o640)
    assert link.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_failure_leaves_the_old_file_alone(tmp_path: Path, *, is_removed: bool) -> None:
    """The error is the first one, also if the new file is away by then."""
    path, temporary = tmp_path / "file", tmp_path / "new"
    path.write_bytes(b"old")

    def finish(_fd: int) -> None:
        if is_removed:
            temporary.unlink()
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        atomic_replace.replace(str(path), str(temporary), b"data", finish)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_in_the_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    """It could lead to any file of the host."""
    (tmp_path / "victim").write_bytes(b"old")
    (tmp_path / "new").symlink_to("victim")
    with pytest.raises(FileExistsError):
        atomic_replace.replace(
            str(tmp_path / "file"), str(tmp_path / "new"), b"data", lambda _fd: None
        )
    assert (tmp_path / "victim").read_bytes() == b"old"
