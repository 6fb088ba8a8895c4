# SPDX-License-Identifier: Apache-2.0
"""Paths below a root: openat2 and the walk agree, and neither ever leaves."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuruntime.system import paths
from gpuruntime.system.paths import Root

NAMES = ("a", "b", "c", "d")
TARGETS = ("a", "b/c", "../a", "../../../..", "/", "/a/b", "..", ".", "/../d", "missing", "a/./b/")


@pytest.fixture
def farm(tmp_path: Path) -> Path:
    """Return a root full of random links, beside a canary that must not be reached."""
    rng = random.Random(7)
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "a").write_text("outside")
    directories = [root]
    for _ in range(60):
        place = rng.choice(directories) / rng.choice(NAMES)
        if place.exists() or place.is_symlink():
            continue
        kind = rng.random()
        if kind < 0.4:
            place.mkdir()
            directories.append(place)
        elif kind < 0.8:
            place.symlink_to(rng.choice(TARGETS))
        else:
            place.write_text("inside")
    return root


def outcome(root: Root, path: str) -> object:
    """Return the inode that *path* leads to, or the error."""
    try:
        fd = root.open_path(path)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    return status.st_dev, status.st_ino


def test_the_walk_finds_what_openat2_finds(farm: Path) -> None:
    """The fallback is used on old kernels, where nobody tests it."""
    rng = random.Random(11)
    fast, slow = Root(str(farm)), Root(str(farm))
    slow._has_openat2 = False
    inside = {os.lstat(farm).st_ino} | {os.lstat(path).st_ino for path in farm.rglob("*")}
    found = 0
    for _ in range(4000):
        parts = [rng.choice((*NAMES, "..", ".", "missing")) for _ in range(rng.randint(1, 6))]
        path = rng.choice(("", "/")) + "/".join(parts) + rng.choice(("", "", "/"))
        one, other = outcome(fast, path), outcome(slow, path)
        assert one == other, path
        if isinstance(one, tuple):
            found += 1
            assert one[1] in inside
    assert found > 300
    fast.close()
    slow.close()


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    """Return a root by each of the two ways."""
    (tmp_path / "root").mkdir()
    opened = Root(str(tmp_path / "root"))
    opened._has_openat2 = request.param
    yield opened
    opened.close()


def test_directories_are_made_inside(root: Root, tmp_path: Path) -> None:
    """A link out of the root must not become a directory outside of it."""
    (tmp_path / "root" / "up").symlink_to("../../outside")
    os.close(root.open_directory("/x/y/z", create=True))
    assert (tmp_path / "root" / "x" / "y" / "z").is_dir()
    with pytest.raises(OSError, match=r"."):
        root.open_directory("/up/new", create=True)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "sparse"])
def test_only_regular_files_of_sane_size_are_read(root: Root, tmp_path: Path, kind: str) -> None:
    """A FIFO would hang, a device may act, a sparse file fills the memory."""
    path = tmp_path / "root" / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
        (tmp_path / "root" / "dev").mkdir()
        if os.geteuid() != 0:
            pytest.skip("mknod needs root")
        os.mknod(tmp_path / "root" / "dev" / "zero", 0o020666, os.makedev(1, 5))
    else:
        with path.open("wb") as stream:
            stream.truncate(1 << 40)
    with pytest.raises(OSError, match=r"."):
        root.read_file("/file", 1 << 20)


def test_replace_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    """A directory in the way makes the rename fail; the new file must be gone then."""
    (tmp_path / "name").mkdir()
    dirfd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"."):
            paths.replace_file(dirfd, "name", b"x", 0o644)
        with pytest.raises(OSError, match=r"."):
            paths.replace_link(dirfd, "name", "target")
    finally:
        os.close(dirfd)
    assert os.listdir(tmp_path) == ["name"]


def test_replace_writes_through_nothing(tmp_path: Path) -> None:
    """A link and a hard link are replaced, what they name stays."""
    victim = tmp_path / "victim"
    victim.write_text("stays")
    (tmp_path / "soft").symlink_to(victim)
    os.link(victim, tmp_path / "hard")
    dirfd = os.open(tmp_path, os.O_RDONLY)
    try:
        for name in ("soft", "hard"):
            paths.replace_file(dirfd, name, b"new", 0o640)
            assert (tmp_path / name).read_text() == "new"
            assert (tmp_path / name).lstat().st_mode & 0o7777 == 0o640
    finally:
        os.close(dirfd)
    assert victim.read_text() == "stays"


RENAME_EXCHANGE = 2
AT_FDCWD = -100
MAX_TRIES = 60_000


def test_race_01_an_exchange_never_leads_outside(tmp_path: Path) -> None:
    """Somebody swaps a directory with a link to the outside while we resolve.

    The control, a check of the path followed by its use, must be beaten in the same run.
    """
    outside = tmp_path / "outside"
    (tmp_path / "root" / "real").mkdir(parents=True)
    outside.mkdir()
    (outside / "file").write_text("outside")
    (tmp_path / "root" / "real" / "file").write_text("inside")
    (tmp_path / "root" / "link").symlink_to(outside)
    swap = (
        "import ctypes, sys; swap = ctypes.CDLL(None).renameat2\n"
        "one, two = (name.encode() for name in sys.argv[1:])\n"
        f"while True: swap({AT_FDCWD}, one, {AT_FDCWD}, two, {RENAME_EXCHANGE})"
    )
    names = [str(tmp_path / "root" / name) for name in ("real", "link")]
    attacker = subprocess.Popen([sys.executable, "-c", swap, *names])
    root = Root(str(tmp_path / "root"))
    escapes = beaten = inside = 0
    prefix = str(tmp_path / "root") + "/"
    try:
        for index in range(MAX_TRIES):
            root._has_openat2 = index % 2 == 0
            try:
                content = root.read_file("/real/file", 100)
                inside += content == b"inside"
                escapes += content == b"outside"
            except OSError:
                pass
            path = f"{prefix}real/file"
            try:
                if os.path.realpath(path).startswith(prefix):
                    beaten += Path(path).read_text() == "outside"
            except OSError:
                pass
            if beaten >= 3 and index > 20_000:
                break
    finally:
        attacker.kill()
        attacker.wait()
        root.close()
    assert escapes == 0
    assert inside > 0
    assert beaten > 0, "the control was never beaten: the race proves nothing"
