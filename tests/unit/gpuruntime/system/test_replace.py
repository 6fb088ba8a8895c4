# SPDX-License-Identifier: Apache-2.0
"""TIME-02, LINK-04: the name under which files and links are made before they are renamed."""

from __future__ import annotations

import os
import posix
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from gpuruntime.system import replace
from gpuruntime.system.replace import replace_file, replace_link

LONG = "x" * 255


def put_file(dirfd: int, name: str) -> None:
    """Put a file."""
    replace_file(dirfd, name, b"ours\n", 0o644)


def put_link(dirfd: int, name: str) -> None:
    """Put a link where there is another, which takes a second name."""
    with suppress(FileExistsError):
        os.symlink("old", name, dir_fd=dirfd)
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


def test_race_04_the_half_of_another_hook_is_never_put_in_place(
    dirfd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hooks on one root: one is about to rename while the other has begun to write."""
    rename, write = posix.rename, posix.write
    has_half, may_go_on = threading.Event(), threading.Event()
    second = threading.Thread(target=replace_file, args=(dirfd, "x", b"second\n" * 9, 0o644))
    read = []

    def write_half(fd: int, data: bytes) -> int:
        if threading.current_thread() is not second or has_half.is_set():
            return write(fd, data)
        count = write(fd, data[: len(data) // 2])
        has_half.set()
        assert may_go_on.wait(10)
        return count

    def rename_late(*names: str, **places: int) -> None:
        if threading.current_thread() is second:
            rename(*names, **places)  # type: ignore[arg-type]  # as it was called
            return
        if not second.ident:
            second.start()
            assert has_half.wait(10)
        try:
            rename(*names, **places)  # type: ignore[arg-type]  # as it was called
            read.append((tmp_path / "x").read_bytes())
        finally:
            may_go_on.set()

    monkeypatch.setattr(posix, "write", write_half)
    monkeypatch.setattr(posix, "rename", rename_late)
    replace_file(dirfd, "x", b"first\n", 0o644)
    second.join(10)
    # Whichever is the last, it is whole.
    assert {*read, (tmp_path / "x").read_bytes()} <= {b"first\n", b"second\n" * 9}
    assert read
    assert os.listdir(tmp_path) == ["x"]


def test_link_04_a_name_that_somebody_guessed(
    dirfd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He has put a link there in the moment before: nothing is written through it."""
    victim = tmp_path / "victim"
    victim.write_text("must stay")
    guessed = []

    def guess(count: int) -> bytes:
        name = tmp_path / f".gpuruntime.x.{bytes(count).hex()}"
        if guessed:
            return b"\1" * count
        guessed.append(name)
        name.symlink_to(victim)
        return bytes(count)

    monkeypatch.setattr(posix, "urandom", guess)
    put_file(dirfd, "x")
    assert victim.read_text() == "must stay"
    assert content(tmp_path / "x") == "ours"
    assert guessed[0].is_symlink()


@pytest.mark.slow
@PUTS
@pytest.mark.parametrize("kind", ["file", "link", "hard link", "directory"])
@pytest.mark.parametrize("times", [1, 10**6])
def test_race_04_what_somebody_put_in_the_place_of_ours_is_not_published(
    put: Callable[[int, str], None],
    dirfd: int,
    tmp_path: Path,
    kind: str,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the moment that ours is made and the one that it is renamed; once, or always.

    The container would load what the file of somebody else names.
    """
    others = tmp_path / "others"
    others.mkdir()
    victim = others / "victim"
    victim.write_text("must stay")
    exchanged = []
    real = replace._identity

    def exchange(status: os.stat_result) -> tuple[int, int]:
        """Exchange ours when it has just been made, by what has another number."""
        found = real(status)
        names = [path for path in tmp_path.iterdir() if path.name.startswith(".gpuruntime.")]
        if len(exchanged) < times and names and real(names[0].lstat()) == found:
            his = others / f"{len(exchanged)}"
            if kind == "file":
                his.write_text("his")
            elif kind == "link":
                his.symlink_to(victim)
            elif kind == "hard link":
                os.link(victim, his)
            else:
                his.mkdir()
                names[0].unlink()
            os.rename(his, names[0])
            exchanged.append(names[0])
        return found

    monkeypatch.setattr(replace, "_identity", exchange)
    try:
        put(dirfd, "x")
    except OSError:
        assert times > 1 or kind == "directory"
    assert exchanged
    assert victim.read_text() == "must stay"
    if os.path.lexists(tmp_path / "x"):
        may_stay = put is put_link and (times > 1 or kind == "directory")
        assert content(tmp_path / "x") in ("ours", *(("old",) if may_stay else ()))
        assert (tmp_path / "x").lstat().st_nlink == 1
    else:
        assert times > 1 or kind == "directory"


@pytest.mark.parametrize("kind", ["file", "link", "fifo", "directory"])
def test_time_02_what_killed_hooks_have_left_is_taken_away(
    dirfd: int, tmp_path: Path, kind: str
) -> None:
    """Each has left another name; what is not of this file stays."""
    for number in range(3):
        name = tmp_path / f".gpuruntime.x.{number:016x}"
        if kind == "file":
            name.write_text("half")
        elif kind == "link":
            name.symlink_to("/nowhere")
        elif kind == "fifo":
            os.mkfifo(name)
        else:
            name.mkdir()
    others = [".gpuruntime.xy.0", ".gpuruntime.y", "x.0"]
    for other in others:
        (tmp_path / other).touch()
    put_file(dirfd, "x")
    left = set(os.listdir(tmp_path)) - {*others, "x"}
    assert len(left) == (3 if kind == "directory" else 0)
    assert set(others) <= set(os.listdir(tmp_path))
    assert content(tmp_path / "x") == "ours"


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    """It has no names any more, and no try of another one would help."""
    place = tmp_path / "gone"
    place.mkdir()
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    place.rmdir()
    try:
        with pytest.raises(FileNotFoundError):
            put_file(fd, "x")
    finally:
        os.close(fd)


def test_a_link_of_a_free_name_is_made_at_once(
    dirfd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole from the first, and takes no second name that somebody could exchange."""
    names = []
    symlink = posix.symlink

    def note(target: str, name: str, **place: int) -> None:
        names.append(name)
        symlink(target, name, **place)

    monkeypatch.setattr(posix, "symlink", note)
    assert replace_link(dirfd, "x", "ours")
    assert names == ["x"]
    assert not replace_link(dirfd, "x", "ours")
    assert os.listdir(tmp_path) == ["x"]
    assert replace_link(dirfd, "x", "another")
    assert names == ["x", "x", "x", ".gpuruntime.x"]
    assert content(tmp_path / "x") == "another"
