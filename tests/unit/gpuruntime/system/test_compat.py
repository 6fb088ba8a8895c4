# SPDX-License-Identifier: Apache-2.0
"""CUDA forward compatibility below roots that somebody else filled, by openat2 and by the walk.

LINK-03, LINK-05, LINK-09, LINK-10, NAME-01, NAME-02 and TIME-01 of the attack catalogue.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import costs
import pytest
from hostile import noted
from hostile.canary import digest

from gpuruntime.formats import ldcache_merge
from gpuruntime.formats.ldcache_merge import ABI_FLAGS, CacheEntry
from gpuruntime.system import compat, drop_in
from gpuruntime.system.compat import CudaCompat
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.paths import Root

TINY = (Path(__file__).parents[3] / "data" / "elf" / "libtiny-x86-64.so").read_bytes()
NATIVE = ABI_FLAGS["x86-64"]
DRIVER = (
    CacheEntry("libtiny.so.1", "/usr/lib64/libtiny.so.1", NATIVE),
    CacheEntry("libother.so.1", "/usr/lib64/libother.so.1", NATIVE),
)
OLDER, NEWER = "570.211.01", "590.44.01"
NAME = "libcuda.so.575.57.08"


class Image:
    """A root, the tree of somebody else beside it, and the warnings."""

    def __init__(self, work: Path, *, has_openat2: bool) -> None:
        self.work = work
        self.root = work / "root"
        self.outside = work / "outside"
        for directory in (self.root / "etc", self.outside):
            directory.mkdir(parents=True)
        self.opened = Root(str(self.root))
        self.opened._has_openat2 = has_openat2
        self.warnings: list[str] = []

    def fill(self, directory: Path, name: str = NAME) -> Path:
        """Put compatibility libraries into *directory*."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(noted.library())
        (directory / "libcuda.so.1").symlink_to(name)
        (directory / "libcuda.so").symlink_to("libcuda.so.1")
        (directory / "libtiny.so.1.2").write_bytes(TINY)
        (directory / "libtiny.so.1").symlink_to("libtiny.so.1.2")
        (directory / "libtiny.so").symlink_to("libtiny.so.1")
        return directory

    def path(self, name: str) -> Path:
        """Return the place of *name* on the host, its directories made."""
        place = Path(f"{self.root}{name}")
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def run(self, version: str = OLDER, directory: str = compat.DEFAULT_ROOT) -> str | None:
        """Carry the operation out; return what the drop-in lists, None without one."""
        before = digest(self.work, self.root)
        with costs.at_most(2):
            CudaCompat(version, directory=directory).execute(self.opened, self.warnings.append)
        assert digest(self.work, self.root) == before
        assert not list(self.root.rglob(".gpuruntime.*"))
        place = self.root / "etc" / "ld.so.conf.d"
        written = list(place.iterdir()) if place.is_dir() and not place.is_symlink() else []
        ours = [path for path in written if path.name == drop_in.COMPAT]
        if not ours:
            return None
        (path,) = ours
        assert path.is_file()
        assert not path.is_symlink()
        assert path.stat().st_mode & 0o7777 == 0o644
        lines = path.read_text().splitlines()
        assert f"{lines[0]}\n".encode() == drop_in.HEADS[drop_in.COMPAT]
        return "\n".join(lines[1:])


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Image]:
    """Return an image whose paths are resolved in one of the two ways."""
    made = Image(tmp_path, has_openat2=request.param)
    yield made
    made.opened.close()


def test_it_is_used_if_it_is_newer_and_gone_if_it_is_not(image: Image) -> None:
    """A container that is started again after an update of the driver has the driver's again."""
    image.fill(image.path("/usr/local/cuda/compat"))
    assert image.run() == "/usr/local/cuda/compat"
    before = digest(image.root)
    assert image.run() == "/usr/local/cuda/compat"
    assert digest(image.root) == before
    assert image.run(NEWER) is None
    assert image.run(NEWER) is None
    assert image.warnings == []
    assert sorted(os.listdir(image.root / "etc" / "ld.so.conf.d")) == []


def test_what_is_not_there_is_not_used(image: Image) -> None:
    """Most images have none; nothing is made."""
    before = digest(image.root)
    assert image.run() is None
    image.path("/usr/local/cuda").write_text("")
    assert image.run() is None
    assert image.warnings == []
    (image.root / "usr/local/cuda").unlink()
    (image.root / "usr/local").rmdir()
    (image.root / "usr").rmdir()
    assert digest(image.root).keys() == before.keys()


@pytest.mark.parametrize(
    ("link", "to", "where"),
    [
        ("/usr/local/cuda", "../../../../../../", "/compat"),
        ("/usr/local/cuda", "/", "/compat"),
        ("/usr/local/cuda", "/etc/alternatives/cuda", "/etc/alternatives/cuda/compat"),
        ("/usr/local", "../opt//x/./", "/opt/x/cuda/compat"),
        ("/usr/local/cuda/compat", "../cuda-12/compat", "/usr/local/cuda-12/compat"),
    ],
)
def test_links_of_the_image_lead_inside(image: Image, link: str, to: str, where: str) -> None:
    """The drop-in names where they lead, as the container sees it."""
    image.fill(image.path(where))
    image.path(link).symlink_to(to)
    assert image.run() == where


def test_another_root_can_be_named(image: Image) -> None:
    """Jetson's images have theirs elsewhere."""
    image.fill(image.path("/usr/local/cuda/compat_orin"))
    assert image.run() is None
    assert image.run(directory="/usr/local/cuda/compat_orin") == "/usr/local/cuda/compat_orin"


def climb(path: Path) -> str:
    """Return a link target that leads to *path* from anywhere, if it may leave."""
    return "../" * 40 + str(path).lstrip("/")


@pytest.mark.parametrize("place", ["/usr", "/usr/local/cuda", compat.DEFAULT_ROOT])
@pytest.mark.parametrize("climbs", [False, True])
def test_link_05_a_directory_outside_is_not_read(image: Image, place: str, climbs: bool) -> None:
    """Libraries of the host are none of the image."""
    for directory in ("", "local/cuda/compat", "compat"):
        image.fill(image.outside / directory)
    image.path(place).symlink_to(climb(image.outside) if climbs else str(image.outside))
    assert image.run() is None
    # Control: by its string, the same place has a library that would do.
    assert (Path(f"{image.root}{compat.DEFAULT_ROOT}") / NAME).read_bytes() == noted.library()


@pytest.mark.parametrize(
    "kind",
    ["link out", "link inside", "directory", "fifo", "socket", "dangling", "itself", "zero"],
)
def test_link_05_link_10_what_is_no_file_is_not_read(image: Image, kind: str) -> None:
    """Its name alone counts for nothing."""
    directory = image.path("/usr/local/cuda/compat")
    directory.mkdir()
    place = directory / "libcuda.so.999.9"
    image.fill(image.outside)
    if kind == "link out":
        place.symlink_to(climb(image.outside / NAME))
    elif kind == "link inside":
        (directory / "file").write_bytes(noted.library())
        place.symlink_to("file")
    elif kind == "directory":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        os.mknod(place, 0o140644)
    elif kind == "dangling":
        place.symlink_to("/nowhere")
    elif kind == "itself":
        place.symlink_to(place.name)
    elif kind == "zero":
        place.touch()
    assert image.run("1.1" if kind == "zero" else OLDER) == (
        "/usr/local/cuda/compat" if kind == "zero" else None
    )
    if kind == "link out":
        # Control: who follows it finds a library that would do.
        assert place.read_bytes() == noted.library()


@pytest.mark.parametrize("kind", ["loop", "chain"])
def test_link_05_links_without_an_end(image: Image, kind: str) -> None:
    """A loop, or 41 of them: said, and not used."""
    if kind == "loop":
        image.path("/usr/local/cuda").symlink_to("/usr/local/cuda")
    else:
        image.fill(image.path("/0"))
        for number in range(1, 42):
            image.path(f"/{number}").symlink_to(str(number - 1))
        image.path(compat.DEFAULT_ROOT).symlink_to("/41")
    assert image.run() is None
    assert "symbolic links" in image.warnings[0]


def test_link_10_a_sparse_library_of_10_tib(image: Image) -> None:
    """Of a file, 64 KiB are read at most."""
    directory = image.path("/usr/local/cuda/compat")
    directory.mkdir()
    with (directory / NAME).open("wb") as stream:
        stream.write(noted.library())
        stream.truncate(10 << 40)
    assert image.run() == "/usr/local/cuda/compat"


@pytest.mark.parametrize(
    "name",
    ["evil\ninclude /x", "a b", "a:b", "a#b", "a*", "a?", "$(x)", "a\\b", "a'b", 'a"b', "-a\t",
     "é", "\udcff", "\u202e", "a\rb"],
)  # fmt: skip
def test_name_02_a_directory_with_an_unclean_name_is_not_used(image: Image, name: str) -> None:
    """Its name would be lines of ld.so.conf."""
    image.fill(image.path(f"/opt/{name}"))
    image.path(compat.DEFAULT_ROOT).symlink_to(f"/opt/{name}")
    assert image.run() is None
    assert "not plain" in image.warnings[0]
    # Control: written as it is, it would be read as another one, or as none.
    assert drop_in._directories(os.fsencode(f"/opt/{name}\n")) != [f"/opt/{name}"]


@pytest.mark.parametrize("name", [".", "..", "-rf", "--", "~", "@"])
def test_name_01_a_directory_with_an_odd_name_is_one(image: Image, name: str) -> None:
    """Of plain characters, it is only a name."""
    if name.strip("."):
        image.fill(image.path(f"/opt/{name}/compat"))
        image.path("/usr/local/cuda").symlink_to(f"/opt/{name}")
        assert image.run() == f"/opt/{name}/compat"


@pytest.mark.parametrize(
    "names",
    [
        [NAME, "libcuda.so.550.1"],
        [NAME, f"{NAME}.bak"],
        [NAME, "libcuda.so.1.1\n"],
        ["libcuda.so.1"],
        ["libcuda.so"],
        ["libcuda.so.575.x\nevil"],
        ["libcuda.so.\udcff.1"],
        ["xlibcuda.so.575.57.08"],
    ],
)
def test_name_01_only_one_library_with_a_version_counts(image: Image, names: list[str]) -> None:
    """Two would be a guess."""
    directory = image.path("/usr/local/cuda/compat")
    directory.mkdir()
    for name in names:
        (directory / name).write_bytes(noted.library())
    assert image.run() is None
    assert bool(image.warnings) is (len(names) > 1)


def test_a_note_that_cannot_be_read_is_said(image: Image) -> None:
    """The library then counts as one without: by its version."""
    directory = image.path("/usr/local/cuda/compat")
    directory.mkdir()
    (directory / NAME).write_bytes(noted.library(b"{"))
    assert image.run(OLDER) == "/usr/local/cuda/compat"
    assert "no JSON" in image.warnings[0]
    assert image.run("575.1") is None


@pytest.mark.parametrize("kind", ["link out", "hard link", "directory", "fifo", "forged"])
def test_link_03_link_09_something_else_has_the_name_of_the_drop_in(
    image: Image, kind: str
) -> None:
    """It is replaced, never written through; and it is left alone if there is nothing to say."""
    victim = image.outside / "victim"
    victim.write_text("must stay")
    place = image.path(f"/etc/ld.so.conf.d/{drop_in.COMPAT}")
    if kind == "link out":
        place.symlink_to(climb(victim))
    elif kind == "hard link":
        os.link(victim, place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.write_text("/evil\n")
    before = place.lstat()
    CudaCompat(OLDER).execute(image.opened, image.warnings.append)
    assert place.lstat().st_ino == before.st_ino
    image.fill(image.path("/usr/local/cuda/compat"))
    CudaCompat(OLDER).execute(image.opened, image.warnings.append)
    assert victim.read_text() == "must stay"
    if kind == "directory":
        assert "Is a directory" in image.warnings[0]
    else:
        assert place.read_bytes().endswith(b"\n/usr/local/cuda/compat\n")
    assert not list(image.root.rglob(".gpuruntime.*"))


@pytest.mark.parametrize("place", ["/etc", "/etc/ld.so.conf.d"])
def test_link_03_the_place_of_the_drop_in_leads_out(image: Image, place: str) -> None:
    """Not written at all, and said."""
    image.fill(image.path("/usr/local/cuda/compat"))
    link = image.path(place)
    if link.is_dir():
        link.rmdir()
    link.symlink_to(climb(image.outside))
    # Control: the string leads to the tree outside.
    assert link.resolve() == image.outside.resolve()
    image.run()
    assert image.warnings
    assert os.listdir(image.outside) == []


def test_time_01_a_directory_of_too_many_names(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed to a limit."""
    image.fill(image.path("/usr/local/cuda/compat"))
    assert image.run() == "/usr/local/cuda/compat"
    monkeypatch.setattr(compat, "MAX_NAMES", 5)
    assert image.run() is None
    assert "over 5 names" in image.warnings[0]


def test_time_01_no_more_libraries_are_read_than_cuda_has(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is opened and read: an image could have as many as there are names."""
    directory = image.path("/usr/local/cuda/compat")
    directory.mkdir()
    (directory / NAME).write_bytes(noted.library())
    for number in range(compat.MAX_LIBRARIES):
        (directory / f"libd{number:03}.so.1").write_bytes(TINY)
    # Behind all that count.
    (directory / "libz.so").symlink_to("libd000.so.1")
    real = compat._read_library
    read = []

    def look(dirfd: int, name: str) -> tuple[str, int]:
        read.append(name)
        return real(dirfd, name)

    monkeypatch.setattr(compat, "_read_library", look)
    apply = CudaCompat(OLDER).apply
    entries = apply(image.opened, image.warnings.append)
    assert read == [NAME, *(f"libd{number:03}.so.1" for number in range(99))]
    assert len(entries) <= compat.MAX_LIBRARIES == 100
    assert "libz.so" not in {entry.soname for entry in entries}
    # The control: among those that count, it is entered.
    (directory / "liba.so").symlink_to("libd000.so.1")
    entries = apply(image.opened, image.warnings.append)
    assert "liba.so" in {entry.soname for entry in entries}


def found_by_loader(image: Image) -> dict[str, str]:
    """Return the first entry of each name in the cache: the one that counts."""
    found: dict[str, str] = {}
    for name, path, *_ in ldcache_merge.parse((image.root / "etc" / "ld.so.cache").read_bytes()):
        found.setdefault(name, path)
    return found


def test_its_libraries_are_first_in_the_cache(image: Image) -> None:
    """And with the next driver, they are not in it."""
    image.fill(image.path("/usr/local/cuda/compat"))
    image.path("/sbin/ldconfig").touch()

    def start(version: str) -> dict[str, str]:
        LoaderCache(DRIVER, CudaCompat(version)).execute(image.opened, image.warnings.append)
        return found_by_loader(image)

    assert start(OLDER) == {
        "libtiny.so": "/usr/local/cuda/compat/libtiny.so",
        "libtiny.so.1": "/usr/local/cuda/compat/libtiny.so.1",
        "libother.so.1": "/usr/lib64/libother.so.1",
    }
    assert (image.root / "etc/ld.so.conf").read_bytes() == drop_in.INCLUDE
    before = digest(image.root)
    start(OLDER)
    assert digest(image.root) == before
    assert start(NEWER) == {entry.soname: entry.path for entry in DRIVER}
    assert not (image.root / "etc" / "ld.so.conf.d" / drop_in.COMPAT).exists()
    start(OLDER)
    # Where nobody asks for it any more, what an earlier start wrote is gone as well.
    LoaderCache(DRIVER).execute(image.opened, image.warnings.append)
    assert found_by_loader(image) == {entry.soname: entry.path for entry in DRIVER}
    assert not (image.root / "etc" / "ld.so.conf.d" / drop_in.COMPAT).exists()
    assert image.warnings == []


def test_libraries_in_it_that_are_none_are_left_out(image: Image) -> None:
    """Names and SONAMEs are the image's, links may lead anywhere."""
    directory = image.fill(image.path("/usr/local/cuda/compat"))
    (directory / "libevil\n.so.1").write_bytes(TINY)
    (directory / "libtext.so.1").write_text("no library")
    (directory / "libloop.so").symlink_to("libloop.so")
    os.mkfifo(directory / "libfifo.so.1")
    (directory / "readme").write_bytes(TINY)
    LoaderCache(DRIVER, CudaCompat(OLDER)).execute(image.opened, image.warnings.append)
    assert sorted(found_by_loader(image)) == ["libother.so.1", "libtiny.so", "libtiny.so.1"]


def test_a_library_without_its_link_is_entered_by_its_file(image: Image) -> None:
    """The loader opens whatever the entry says."""
    directory = image.fill(image.path("/usr/local/cuda/compat"))
    (directory / "libtiny.so.1").unlink()
    LoaderCache(DRIVER, CudaCompat(OLDER)).execute(image.opened, image.warnings.append)
    assert found_by_loader(image)["libtiny.so.1"] == "/usr/local/cuda/compat/libtiny.so.1.2"


def test_it_says_what_it_does() -> None:
    """In a line, for explain and for debugging."""
    assert "550.1" in CudaCompat("550.1").describe()
    assert "CUDA 12.4" in CudaCompat("", "12.4").describe()
    assert "550.1" in LoaderCache(DRIVER, CudaCompat("550.1")).describe()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: chattr")
def test_link_13_an_append_only_directory_has_nothing_left_in_it(image: Image) -> None:
    """A file could be made there and neither renamed nor removed."""
    image.fill(image.path("/usr/local/cuda/compat"))
    place = image.path("/etc/ld.so.conf.d")
    place.mkdir()
    if subprocess.run(["chattr", "+a", place], check=False, capture_output=True).returncode:
        pytest.skip("the file system has no such flag")
    try:
        assert image.run() is None
        assert os.listdir(place) == []
        assert "append-only" in image.warnings[0]
        # Control: a temporary name, made there, would stay.
        (place / "new").touch()
        with pytest.raises(PermissionError):
            (place / "new").unlink()
    finally:
        subprocess.run(["chattr", "-a", place], check=True)
