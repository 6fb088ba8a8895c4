# SPDX-License-Identifier: Apache-2.0
"""Paths below many random roots, and what is made below a root while another process swaps it.

RACE-01, RACE-03 to RACE-05 and RACE-08 of the attack catalogue.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import descriptors
import pytest
from effort import IS_FULL
from hostile.canary import digest

from gpuruntime.system import paths, replace
from gpuruntime.system.paths import Root

TREE = Path(__file__).parents[4]
EXCHANGE = TREE / "tests" / "hostile" / "exchange.py"
NAMES = ("a", "b", "c")
FARMS = 40
PATHS = 100
SECONDS = 4.0 if IS_FULL else 0.5
# How long the two sides may take to meet.
PATIENCE_S = 40
MAX_TRIES = 20_000
LEAST_DONE = 100


def fill(root: Path, rng: random.Random) -> None:
    """Fill *root* with directories, files, FIFOs and links of every kind."""
    directories = [root]
    targets = ["..", "../..", "/", ".", "/../..", "missing", "a/", "b/.", "../../outside", "/a/b"]
    for _ in range(rng.randint(5, 40)):
        place = rng.choice(directories) / rng.choice(NAMES)
        if os.path.lexists(place):
            continue
        kind = rng.random()
        if kind < 0.35:
            place.mkdir()
            directories.append(place)
        elif kind < 0.8:
            parts = [rng.choice((*NAMES, "..", ".")) for _ in range(rng.randint(1, 5))]
            random_target = rng.choice(("", "/")) + "/".join(parts)
            place.symlink_to(rng.choice((*targets, random_target, random_target)))
        elif kind < 0.95:
            place.write_text("inside")
        else:
            os.mkfifo(place)


def outcome(root: Root, path: str) -> object:
    """Return the inode that *path* leads to, or the error."""
    try:
        fd = root.open_path(path)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


@pytest.mark.slow
@pytest.mark.property
def test_walk_and_openat2_agree_on_random_roots(tmp_path: Path) -> None:
    """The same inode or the same error on each of 4000 paths, and never an inode outside."""
    rng = random.Random(20)
    (tmp_path / "outside").write_text("outside")
    kinds = set()
    for number in range(FARMS):
        place = tmp_path / f"root{number}"
        place.mkdir()
        fill(place, rng)
        inside = {place.stat().st_ino} | {path.lstat().st_ino for path in place.rglob("*")}
        fast, slow = Root(str(place)), Root(str(place))
        slow._has_openat2 = False
        for _ in range(PATHS):
            parts = [rng.choice((*NAMES, *NAMES, "..", ".", "")) for _ in range(rng.randint(1, 7))]
            path = rng.choice(("", "/")) + "/".join(parts)
            one, other = outcome(fast, path), outcome(slow, path)
            assert one == other, (number, path)
            assert isinstance(one, str) or one in inside
            kinds.add(one if isinstance(one, str) else "found")
        fast.close()
        slow.close()
    assert kinds >= {"found", "ENOENT", "ENOTDIR", "ELOOP"}


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    """Return a root, with a tree beside it, by each of the two ways."""
    for name in ("root", "outside"):
        (tmp_path / name).mkdir()
    opened = Root(str(tmp_path / "root"))
    opened._has_openat2 = request.param
    yield opened
    opened.close()


@pytest.mark.parametrize("path", ["/file/.", "/file/", "/file/..", "/file/x", "/link/.", "/link/"])
def test_a_file_is_no_directory(root: Root, tmp_path: Path, path: str) -> None:
    """The three differences of the first walk were all of this form."""
    (tmp_path / "root" / "file").write_text("")
    (tmp_path / "root" / "link").symlink_to("file")
    assert outcome(root, path) == "ENOTDIR"


def test_forty_links_are_followed_and_no_more(root: Root, tmp_path: Path) -> None:
    """The kernel's limit; a walk without one runs for ever."""
    (tmp_path / "root" / "0").mkdir()
    for number in range(1, 42):
        (tmp_path / "root" / str(number)).symlink_to(str(number - 1))
    assert outcome(root, "/40") == (tmp_path / "root" / "0").stat().st_ino
    assert outcome(root, "/41") == "ELOOP"


def test_every_descriptor_is_closed_again(root: Root, tmp_path: Path) -> None:
    """An image can make each of a thousand resolutions fail at another place."""
    fill(tmp_path / "root", random.Random(3))
    before = len(descriptors.opened())
    for parts in itertools.product((*NAMES, ".."), repeat=4):
        outcome(root, "/".join(parts))
        try:
            os.close(root.open_directory("/".join(parts), create=True))
        except OSError:
            pass
    assert len(descriptors.opened()) == before


def read_file(root: Root, number: int) -> None:
    """RACE-01: read below the directory that is swapped."""
    fd = root.open_path("/real/kept")
    try:
        assert paths.read_of_image(fd, "/real/kept", 100) == b"inside"
    finally:
        os.close(fd)


def make_directory(root: Root, number: int) -> None:
    """RACE-03: make directories below the one that is swapped."""
    os.close(root.open_directory(f"/real/new{number % 5000}/deep", create=True))


def write_file(root: Root, number: int) -> None:
    """RACE-04: put a file into the directory that is swapped."""
    dirfd = root.open_directory("/real")
    try:
        replace.replace_file(dirfd, f"file{number % 50}", b"content", 0o644)
    finally:
        os.close(dirfd)


def make_link(root: Root, number: int) -> None:
    """RACE-05: put a link into the directory that is swapped."""
    dirfd = root.open_directory("/real")
    try:
        replace.replace_link(dirfd, f"link{number % 50}", str(number))
    finally:
        os.close(dirfd)


def checked(root: str) -> str | None:
    """Return the path that is swapped if it is inside right now, as naive code asks."""
    path = f"{root}/real"
    return path if os.path.realpath(path).startswith(f"{root}/") else None


def naive_read(root: str, number: int) -> None:
    """Read a file after a check; leave a file where it was led."""
    path = checked(root)
    if path and Path(f"{path}/kept").read_text() == "outside":
        Path(f"{root}/../outside/beaten").touch()


def naive_directory(root: str, number: int) -> None:
    """Make a directory after a check."""
    path = checked(root)
    if path:
        os.makedirs(f"{path}/new{number}/deep", exist_ok=True)


def naive_file(root: str, number: int) -> None:
    """Write a file after a check."""
    path = checked(root)
    if path:
        Path(f"{path}/file{number}").write_text("content")


def naive_link(root: str, number: int) -> None:
    """Make a link after a check."""
    path = checked(root)
    if path:
        os.symlink("target", f"{path}/link{number}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "naive"),
    [
        (read_file, naive_read),
        (make_directory, naive_directory),
        (write_file, naive_file),
        (make_link, naive_link),
    ],
    ids=["race_01_read", "race_03_directory", "race_04_file", "race_05_link"],
)
def test_nothing_is_made_outside_while_another_process_swaps(
    root: Root,
    tmp_path: Path,
    operation: Callable[[Root, int], None],
    naive: Callable[[str, int], None],
) -> None:
    """A directory and a link that climbs out change places all the time.

    Inside the root the link leads to a directory as well, so both are places to work in.
    """
    place, outside = tmp_path / "root", tmp_path / "outside"
    (place / "real").mkdir()
    (place / "outside").mkdir()
    (place / "link").symlink_to("../outside")
    for directory in (place / "real", place / "outside"):
        (directory / "kept").write_text("inside")
    (outside / "kept").write_text("outside")
    command = [sys.executable, str(EXCHANGE), str(place / "real"), str(place / "link")]
    before = digest(outside)
    done = beaten = number = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"begun\n"
            swaps = set()
            end = time.monotonic() + SECONDS
            # On a busy machine the two may not have met by then.
            while (time.monotonic() < end and number < MAX_TRIES) or (
                time.monotonic() < end + PATIENCE_S and (len(swaps) < 2 or done <= LEAST_DONE)
            ):
                number += 1
                swaps.add((place / "real").is_symlink())
                try:
                    operation(root, number)
                    done += 1
                except OSError:
                    pass
            assert digest(outside) == before
            assert swaps == {True, False}, "no swap was seen: the race proves nothing"
            # The control, in the same race: until it is beaten.
            end = time.monotonic() + PATIENCE_S
            while not beaten and time.monotonic() < end:
                number += 1
                try:
                    naive(str(place), number)
                except OSError:
                    pass
                beaten = len(os.listdir(outside)) - 1
        finally:
            attacker.kill()
    assert done > LEAST_DONE
    assert beaten, "the control was never beaten: the race proves nothing"
    assert not list(place.rglob(".gpuruntime.*"))


RETRY = """
import sys
from gpuruntime.system.paths import Root
root = Root(sys.argv[1])
try:
    root.open_path("/a")
    print("opened")
except OSError as error:
    print(error.errno)
"""


@pytest.mark.system("strace")
@pytest.mark.parametrize(
    ("times", "result"), [("1", "opened"), ("1..10", "opened"), ("1+", str(errno.EAGAIN))]
)
def test_race_08_eagain_is_tried_again_but_not_for_ever(
    tmp_path: Path, times: str, result: str
) -> None:
    """The kernel answers it while somebody renames; an attacker renames all the time."""
    (tmp_path / "a").mkdir()
    start = time.monotonic()
    done = subprocess.run(
        ["strace", "-qq", "-o", "/dev/null", "-e", "trace=openat2",
         "-e", f"inject=openat2:error=EAGAIN:when={times}", sys.executable, "-c", RETRY,
         str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=TREE,
    )  # fmt: skip
    assert done.stdout.strip() == result
    assert time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.parametrize("has_openat2", [True, False])
def test_a_path_of_many_parts_is_made(tmp_path: Path, *, has_openat2: bool) -> None:
    """One by one: there is no depth that Python could not follow."""
    root = Root(str(tmp_path))
    root._has_openat2 = has_openat2
    path = "/a" * 600
    os.close(root.open_directory(path, create=True))
    os.close(root.open_directory(path))
    (tmp_path / "link").symlink_to("a/a")
    os.close(root.open_directory("/link/b/c", create=True))
    assert (tmp_path / "a/a/b/c").is_dir()
    with pytest.raises(OSError, match="Invalid argument"):
        root.open_directory("/missing/../x", create=True)
    assert not (tmp_path / "x").exists()


def test_link_10_a_file_of_the_kernel_s_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it has nothing, and may act when it is read, as /proc/kmsg does."""
    monkeypatch.setattr(paths, "reopen", lambda *_: pytest.fail("opened"))
    fd = os.open("/proc/self/status", os.O_PATH)
    try:
        assert paths.read_of_image(fd, "x", 100) == b""
    finally:
        os.close(fd)
