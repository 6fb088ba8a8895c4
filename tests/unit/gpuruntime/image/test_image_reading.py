# SPDX-License-Identifier: Apache-2.0
"""Reading the files of an image: what is in them, what is never opened, and what it costs."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import costs
import descriptors
import pytest
from driver_roots import elf
from hostile import noted
from image_trees import ABI, LOADER, MULTIARCH, Image, elf_file, glibc

from gpuruntime.errors import GpuRuntimeError, RequestError
from gpuruntime.image import archive, collect, directory
from gpuruntime.image import elf_file as elf_files
from gpuruntime.image.collect import Collector
from gpuruntime.image.contents import Contents

TEN_GIB = 10 << 30


def read(path: Path) -> Contents:
    """Return what is in the directory *path*."""
    return directory.read(str(path), Collector())


def exported(path: Path, work: Path) -> Contents:
    """Return what is in the stream of the archive of *path*."""
    tar = work / "image.tar"
    with tarfile.open(tar, "w") as stream:
        stream.add(path, arcname=".", recursive=True)
    with tar.open("rb") as file:
        return archive.read(file, Collector())


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return an image with one of each that matters."""
    image = Image(tmp_path_factory.mktemp("image")).glibc("2.31")
    image.program(
        "/usr/bin/app",
        *("libc.so.6", "libcuda.so.1"),
        requires={"libc.so.6": ["GLIBC_2.17"]},
        opens=["libnvcuvid.so.1", "/usr/lib/libnvidia-ml.so.1", "xlibcuda.so.2", "libcuda.so.%d"],
        search="$ORIGIN/../lib:/opt",
    )
    os.link(image.at("/usr/bin/app"), image.at("/usr/bin/second"))
    image.link("/lib/libcuda.so.1", "../usr/lib/none")
    image.at("/usr/lib/libcuda.so.535.1").touch()
    image.at("/etc/ld.so.conf").write_text("/opt/lib\n")
    image.at("/etc/motd").write_text("libcuda.so.1\n" * 9)
    return image


@pytest.mark.parametrize("how", [lambda path, _: read(path), exported], ids=["tree", "stream"])
def test_what_is_in_an_image(
    image: Image, tmp_path: Path, how: Callable[[Path, Path], Contents]
) -> None:
    """A directory and a stream of the same files have the same in them."""
    contents = how(image.path, tmp_path)
    names = {"/usr/bin/app", "/usr/bin/second"}
    (name,) = names & set(contents.binaries)
    app = contents.binaries[name]
    assert contents.binary(*(names - {name})) == app
    assert (app.abi, app.needed) == (ABI, ("libc.so.6", "libcuda.so.1"))
    assert app.opens == ("libnvcuvid.so.1", "libnvidia-ml.so.1")
    assert app.interpreter == LOADER
    assert app.search == ("$ORIGIN/../lib", "/opt")
    assert app.versions.requires == (("libc.so.6", "GLIBC_2.17"),)
    libc = contents.binary(f"{MULTIARCH}/libc.so.6")
    assert libc is not None
    assert set(glibc("2.31")) < libc.versions.provides
    assert contents.links["/lib/libcuda.so.1"] == "../usr/lib/none"
    assert contents.empty == {"/usr/lib/libcuda.so.535.1"}
    assert contents.config == {"/etc/ld.so.conf": b"/opt/lib\n"}
    assert (contents.limits, contents.is_complete) == ([], True)


@pytest.mark.parametrize("size", [5, 13, 100])
def test_names_are_seen_across_chunks(
    size: int, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large .rodata is read in pieces."""
    monkeypatch.setattr(elf_files, "_CHUNK_BYTES", size)
    contents = read(image.path)
    app = contents.binary("/usr/bin/app")
    assert app is not None
    assert app.opens == ("libnvcuvid.so.1", "libnvidia-ml.so.1")


@pytest.mark.skipif(
    os.stat("/dev").st_dev == os.stat("/dev/shm").st_dev, reason="/dev/shm is no file system"
)
def test_another_file_system_is_left_out_and_said() -> None:
    """A volume is not of the image, and may be large, or hang."""
    contents = read(Path("/dev"))
    assert '"/shm" is not examined: it is another file system' in contents.limits
    assert not contents.is_complete


def test_a_path_of_links_ends() -> None:
    """Links of links of many parts would take for ever."""
    links = {"/short": "x/../" * 100 + "m", "/long": "x/../" * 600 + "m", "/m": "n"}
    assert [Contents(links=links).resolve(path) for path in ("/short", "/long")] == ["/n", None]


def test_the_note_of_forward_compatibility_is_read(tmp_path: Path) -> None:
    """It says for which drivers a libcuda of the image is."""
    (tmp_path / "libcuda.so.575.57.08").write_bytes(noted.library())
    note = read(tmp_path).binaries["/libcuda.so.575.57.08"].note
    assert note is not None
    assert (note.cuda_version, note.drivers) == ("12.9", noted.DRIVERS)


@pytest.mark.parametrize(
    ("path", "real"),
    [
        ("/a/b/x", "/a/b/x"),
        ("/to-a/./b/../x", "/a/x"),
        ("/up/x", "/x"),
        ("/abs/x", "/a/x"),
        ("/round/x", None),
        ("/../../x", "/x"),
    ],
)
def test_links_are_resolved_inside_the_image(path: str, real: str | None) -> None:
    """As the loader in the container will, whose root the image is."""
    links = {
        "/to-a": "a",
        "/up": "../../../..",
        "/abs": "/a",
        "/round": "/square",
        "/square": "round",
    }
    assert Contents(links=links).resolve(path) == real


def _outside(tree: Path) -> None:
    outside = tree.parent / "outside"
    outside.mkdir()
    (outside / "libcuda.so.1").write_bytes(elf("libcuda.so.1"))
    (tree / "lib").symlink_to(outside)
    (tree / "libcuda.so.1").symlink_to(outside / "libcuda.so.1")
    (tree / "up").symlink_to("../outside")


def _loops(tree: Path) -> None:
    (tree / "self").symlink_to("self")
    (tree / "here").symlink_to(".")
    (tree / "etc").mkdir()
    (tree / "etc/ld.so.cache").symlink_to("ld.so.cache")


def _fifos(tree: Path) -> None:
    (tree / "etc").mkdir()
    for name in ("libcuda.so.1", "etc/ld.so.cache", "etc/ld.so.conf"):
        os.mkfifo(tree / name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tree / "libnvidia-ml.so.1"))


def _names(tree: Path) -> None:
    for name in (b"\xff\xfe.so", b"line\nfeed.so", b"\x1b[2J.so", b"x" * 255):
        Path(os.fsdecode(os.path.join(os.fsencode(tree), name))).write_bytes(b"x" * 100)


@pytest.mark.parametrize("make", [_outside, _loops, _fifos, _names])
def test_what_a_tree_of_hostile_names_has(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No link is followed, nothing but a regular file is opened, and nothing hangs."""
    tree = tmp_path / "tree"
    tree.mkdir()
    monkeypatch.chdir(tree)
    make(tree)
    contents = read(tree)
    assert (contents.binaries, contents.config, contents.limits) == ({}, {}, [])
    assert contents.entries > 2


def _to_link(path: Path) -> None:
    outside = path.parents[1] / "outside"
    outside.mkdir()
    (outside / "libcuda.so.1").write_bytes(elf("libcuda.so.1"))
    path.symlink_to(outside / "libcuda.so.1" if path.name == "libcuda.so.1" else outside)


def _to_device(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))


@pytest.mark.parametrize("name", ["libcuda.so.1", "directory"])
@pytest.mark.parametrize(
    "change",
    [
        _to_link,
        os.mkfifo,
        pytest.param(
            _to_device,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes"),
        ),
    ],
)
def test_what_is_exchanged_once_it_is_listed_is_not_opened(
    change: Callable[[Path], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open a device may act, to open a FIFO waits, and a link leads out of the image."""
    path = tmp_path / "tree" / name
    path.parent.mkdir()
    if name == "directory":
        path.mkdir()
    else:
        path.write_bytes(elf("libcuda.so.1"))

    class Exchanging(Collector):
        def count(self) -> None:
            super().count()
            if self.contents.entries == 1:
                path.rename(tmp_path / "away")
                change(path)

    opened: list[str] = []
    reopen = directory.reopen

    def noted(fd: int, flags: int) -> int:
        opened.append(os.readlink(f"/proc/self/fd/{fd}"))
        return reopen(fd, flags)

    monkeypatch.setattr(directory, "reopen", noted)
    contents = directory.read(str(path.parent), Exchanging())
    assert (contents.entries, contents.binaries, opened) == (1, {}, [])


def test_deep_directories_end_the_descent(tmp_path: Path) -> None:
    """Each level has an open descriptor."""
    place = tmp_path
    for _ in range(directory.MAX_DEPTH + 5):
        place /= "d"
    place.mkdir(parents=True)
    (tmp_path / "libx.so").write_bytes(elf("libx.so"))
    before = descriptors.opened()
    contents = read(tmp_path)
    assert [text.partition(": ")[2] for text in contents.limits] == ["it is below 100 directories"]
    assert list(contents.binaries) == ["/libx.so"]
    assert descriptors.opened() == before


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("MAX_ENTRIES", 3),
        ("MAX_LINKS", 1),
        ("MAX_BINARIES", 1),
        ("MAX_SCANNED_BYTES", 3),
        ("MAX_KEPT_CHARS", 9),
    ],
)
def test_a_limit_ends_the_walk_and_is_said(
    limit: str, value: int, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known must not look as if it were not there."""
    monkeypatch.setattr(collect, limit, value)
    contents = read(image.path)
    assert not contents.is_complete
    assert contents.limits[0].startswith(f"the image is larger: only {value} ")


def test_the_time_ends_the_walk_and_is_said(image: Image) -> None:
    """A file system may be slow."""
    contents = directory.read(str(image.path), Collector(deadline_s=0))
    assert contents.limits == ["the image is larger: only 0 s were spent on reading it"]
    assert not contents.is_complete


def _sparse(path: Path) -> None:
    """Write a library of 10 GiB whose .rodata is all of it."""
    data = bytearray(elf_file(path, soname="libx.so", opens=["libcuda.so.1"]).read_bytes())
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    start = struct.unpack_from("<Q", data, table + names * size + 24)[0]
    for index in range(count):
        at = table + index * size
        name = start + struct.unpack_from("<I", data, at)[0]
        if data[name : name + 8] == b".rodata\0":
            struct.pack_into("<QQ", data, at + 24, 1 << 20, TEN_GIB - (1 << 20))
    path.write_bytes(data)
    os.truncate(path, TEN_GIB)


def test_a_sparse_library_of_10_gib_costs_little(tmp_path: Path) -> None:
    """Its size is what the image says, and no reason to read it all."""
    _sparse(tmp_path / "libx.so")
    tracemalloc.start()
    try:
        with costs.at_most(5):
            contents = read(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert list(contents.binaries) == ["/libx.so"]
    assert peak < 32 << 20


@pytest.mark.slow
def test_a_tree_of_50_000_files_costs_at_most_10_seconds(tmp_path: Path) -> None:
    """As many as the largest images have, two thousand of them ELF."""
    program = elf("libx.so.1", ["libc.so.6", "libm.so.6"])
    for number in range(50):
        folder = tmp_path / f"d{number}"
        folder.mkdir()
        for name in range(1000):
            (folder / f"f{name}").write_bytes(program if name % 25 == 0 else b"text\n" * 20)
    with costs.at_most(10):
        contents = read(tmp_path)
    assert (contents.entries, len(contents.binaries)) == (50_050, 2_000)


def _damaged(where: int, words: str, *values: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(f"<{words}", data, where, *values)


def _self_linked(data: bytearray) -> None:
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    for index in range(count):
        struct.pack_into("<I", data, table + index * size + 40, index)


DAMAGE: dict[str, Callable[[bytearray], None]] = {
    "all section counts": _damaged(60, "H", 0xFFFF),
    "a section count in a section": _damaged(60, "H", 0),
    "sections beyond the end": _damaged(40, "Q", 1 << 62),
    "no names": _damaged(62, "H", 0xFFFE),
    "sections that link to themselves": _self_linked,
    "tiny sections": _damaged(58, "H", 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_section_headers_hide_no_need(
    damage: Callable[[bytearray], None], tmp_path: Path
) -> None:
    """The loader does without section headers, and so loads what such a program needs."""
    path = elf_file(tmp_path / "app", needed=["libcuda.so.1"], interpreter=LOADER)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    with costs.at_most(5):
        contents = read(tmp_path)
    assert contents.binaries["/app"].needed == ("libcuda.so.1",)
    assert contents.limits == []


@pytest.mark.parametrize(
    ("where", "words", "value"),
    [(32, "Q", 1 << 63), (54, "H", 3), (56, "H", 0xFFFF), (4, "B", 7), (6, "B", 9)],
)
def test_a_damaged_program_is_left_out_and_said(
    where: int, words: str, value: int, tmp_path: Path
) -> None:
    """One line, no traceback, and the next file is read."""
    path = elf_file(tmp_path / "app", needed=["libcuda.so.1"], interpreter=LOADER)
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{words}", data, where, value)
    path.write_bytes(data)
    (tmp_path / "good").write_bytes(elf("good"))
    contents = read(tmp_path)
    assert list(contents.binaries) == ["/good"]
    (limit,) = contents.limits
    assert limit.startswith('"/app" is not examined: a damaged ELF file: ')


@pytest.mark.slow
def test_each_byte_of_a_program_may_be_any(tmp_path: Path) -> None:
    """Whatever stands in the headers, what is read is a value or a damaged file."""
    source = elf_file(tmp_path / "app", needed=["libcuda.so.1"], interpreter=LOADER).read_bytes()
    (table,) = struct.unpack_from("<Q", source, 40)
    places = [*range(5, 64), *range(64, 64 + 56 * 3, 3), *range(table, len(source), 5)]
    tree = tmp_path / "tree"
    tree.mkdir()
    for number, place in enumerate(places):
        data = bytearray(source)
        data[place] ^= 0xFF
        (tree / f"f{number}").write_bytes(data)
    with costs.at_most(60):
        contents = read(tree)
    assert contents.entries == len(places)
    assert len(contents.binaries) > len(places) // 2


def test_what_is_no_directory_is_one_line(tmp_path: Path) -> None:
    """The caller's mistake, before anything is read."""
    (tmp_path / "file").touch()
    for name in ("file", "none"):
        with pytest.raises(RequestError, match="cannot open the root file system"):
            read(tmp_path / name)


def test_a_stream_that_ends_early_is_one_line(image: Image, tmp_path: Path) -> None:
    """The engine was killed, or its disk is full."""
    tar = tmp_path / "image.tar"
    with tarfile.open(tar, "w") as stream:
        stream.add(image.path, arcname=".")
    os.truncate(tar, tar.stat().st_size // 2 + 100)
    with tar.open("rb") as file, pytest.raises(GpuRuntimeError, match="cannot be read"):
        archive.read(file, Collector())
