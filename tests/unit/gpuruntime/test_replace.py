# SPDX-License-Identifier: Apache-2.0
"""TIME-02, LINK-04: the name under which files and links are made before they are renamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuruntime.system.paths import replace_file, replace_link

LONG = "x" * 255


def put_file(dirfd: int, name: str) -> None:
    """Put a file."""
    replace_file(dirfd, name, b"ours\n", 0o644)


def put_link(dirfd: int, name: str) -> None:
    """Put a link."""
    replace_link(dirfd, name, "ours")


PUTS = pytest.mark.parametrize("put", [put_file, put_link])


@pytest.fixture
def dirfd(tmp_path: Path) -> Iterator[int]:
    """Return a descriptor of the test's directory."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def content(path: Path) -> str:
    """Return what is in a file or a link of ours."""
    return os.readlink(path) if path.is_symlink() else path.read_text().strip()


@PUTS
@pytest.mark.parametrize("kind", ["file", "link", "hard link", "dangling", "fifo"])
def test_what_has_the_name_is_taken_away(
    put: Callable[[int, str], None], dirfd: int, tmp_path: Path, kind: str
) -> None:
    """A killed hook has left it, or the image has it: nothing is written to what it leads to."""
    outside = tmp_path / "outside"
    outside.write_text("outside")
    temporary = tmp_path / ".gpuruntime.x"
    if kind == "file":
        temporary.write_text("half")
    elif kind == "hard link":
        os.link(outside, temporary)
    elif kind == "fifo":
        os.mkfifo(temporary)
    else:
        temporary.symlink_to(outside if kind == "link" else "missing")
    put(dirfd, "x")
    assert sorted(os.listdir(tmp_path)) == ["outside", "x"]
    assert content(tmp_path / "x") == "ours"
    assert outside.read_text() == "outside"


@PUTS
def test_a_directory_of_that_name_stays(
    put: Callable[[int, str], None], dirfd: int, tmp_path: Path
) -> None:
    """Another name is used."""
    (tmp_path / ".gpuruntime.x").mkdir()
    put(dirfd, "x")
    assert sorted(os.listdir(tmp_path)) == [".gpuruntime.x", "x"]
    assert content(tmp_path / "x") == "ours"


@PUTS
def test_the_longest_name(put: Callable[[int, str], None], dirfd: int, tmp_path: Path) -> None:
    """There is none that is longer by a prefix."""
    put(dirfd, LONG)
    assert os.listdir(tmp_path) == [LONG]


@PUTS
def test_a_directory_in_the_way_stays(
    put: Callable[[int, str], None], dirfd: int, tmp_path: Path
) -> None:
    """Nothing is left beside it."""
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="directory"):
        put(dirfd, "x")
    assert os.listdir(tmp_path) == ["x"]


@PUTS
def test_many_at_once(put: Callable[[int, str], None], dirfd: int, tmp_path: Path) -> None:
    """Hooks of containers that share a root: each succeeds, and none finds another's half."""

    def try_often(number: int) -> None:
        for count in range(100):
            if number == count % 4 and put is put_link:
                (tmp_path / "x").unlink(missing_ok=True)
            put(dirfd, "x")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(try_often, range(4)))
    assert os.listdir(tmp_path) == ["x"]
    assert content(tmp_path / "x") == "ours"
