# SPDX-License-Identifier: Apache-2.0
"""The loader cache as a file: every format in, one format out, damaged files, our own mark."""

from __future__ import annotations

import shutil
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache as ldcache_format
from gpuruntime.formats import ldcache_merge
from gpuruntime.formats.ldcache_merge import CacheEntry, listed_directories, merge, parse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LDCONFIG = shutil.which("ldconfig", path="/usr/sbin:/sbin")
X86 = ldcache_merge.ABI_FLAGS["x86-64"]
V3 = 1 << 62 | 1
OURS_TAG = 0x47505521
GENERATOR = b"ldconfig (test) release version 2.99"

Row = tuple[str, str, int, int, int]


def row(name: str, directory: str = "/lib", hwcap: int = 0, flags: int = X86) -> Row:
    """Return an entry as parse gives it."""
    return (name, f"{directory}/{name}", flags, 0, hwcap)


IMAGE = [
    row("libz.so.1"),
    row("libcuda.so.1", "/usr/lib/v3", V3),
    row("libcuda.so.1", "/usr/lib"),
    row("libc.so.6"),
    row("ld.so"),
]
OURS = [
    CacheEntry("libnvidia-ml.so.1", "/opt/gpu/libnvidia-ml.so.1", X86),
    CacheEntry("libcuda.so", "/opt/gpu/libcuda.so", X86),
    CacheEntry("libcuda.so.1", "/opt/gpu/libcuda.so.1", X86),
]
MERGED = [
    IMAGE[0],
    row("libnvidia-ml.so.1", "/opt/gpu"),
    row("libcuda.so.1", "/opt/gpu"),
    *IMAGE[1:3],
    row("libcuda.so", "/opt/gpu"),
    *IMAGE[3:],
]


def lists_directory(image: bytes | None, directory: str) -> bool:
    """Return whether *image* has a library in *directory*."""
    return listed_directories(image, [directory]) == {directory}


def extension(at: int, sections: Sequence[tuple[int, bytes]], magic: int = 0xEAA42174) -> bytes:
    """Return an extension that starts at offset *at*."""
    head = struct.pack("<II", magic, len(sections))
    at += 8 + 16 * len(sections)
    for tag, content in sections:
        head += struct.pack("<IIII", tag, 0, at, len(content))
        at += len(content)
    return head + b"".join(content for _, content in sections)


def cache_file(
    rows: Sequence[Row],
    layout: str = "new",
    *,
    hwcaps: Sequence[str] = (),
    sections: Sequence[tuple[int, bytes]] = ((0, GENERATOR),),
) -> bytes:
    """Return the file that glibc's ldconfig writes for *rows*, in one of its three layouts.

    *layout* is new, compat, compat4 (the second header aligned to 4), or old.
    """
    names = [text for r in rows for text in (r[0], r[1])] + list(hwcaps)
    strings, places = b"", {}
    for text in names:
        places[text] = len(strings)
        strings += text.encode("utf-8", "surrogateescape") + b"\0"
    old = b""
    base = 0
    if layout != "new":
        end = 16 + 12 * len(rows)
        align = {"compat": 8, "compat4": 4, "old": 1}[layout]
        base = (end + align - 1) & -align
        # Behind an old table the strings follow the new one, which the old offsets skip.
        skip = 0 if layout == "old" else base - end + 48 + 24 * len(rows)
        old = struct.pack("<11sxI", b"ld.so-1.7.0", len(rows))
        for name, value, flags, _, _ in rows:
            old += struct.pack("<III", flags, skip + places[name], skip + places[value])
        old += bytes(base - end)
        if layout == "old":
            return old + strings
    lead = 48 + 24 * len(rows)
    table = b"".join(
        struct.pack("<IIIIQ", flags, lead + places[name], lead + places[value], osversion, hwcap)
        for name, value, flags, osversion, hwcap in rows
    )
    at = (base + lead + len(strings) + 3) & -4
    if hwcaps:
        offsets = struct.pack(f"<{len(hwcaps)}I", *(lead + places[text] for text in hwcaps))
        sections = [(1, offsets), *sections]
    header = struct.pack(
        "<20sIIB3xI12x", b"glibc-ld.so.cache1.1", len(rows), len(strings), 2, at if sections else 0
    )
    body = old + header + table + strings
    return body + bytes(at - len(body)) + (extension(at, sections) if sections else b"")


def sections_of(data: bytes) -> dict[int, bytes]:
    """Return the sections of a new-only file's extension."""
    (at,) = struct.unpack_from("<I", data, 32)
    magic, count = struct.unpack_from("<II", data, at)
    assert magic == 0xEAA42174
    assert at % 4 == 0
    rows = [struct.unpack_from("<IIII", data, at + 8 + 16 * i) for i in range(count)]
    return {tag: data[offset : offset + size] for tag, _, offset, size in rows}


def hwcaps_of(data: bytes) -> list[bytes]:
    """Return the hwcaps names of a new-only file."""
    content = sections_of(data).get(1, b"")
    offsets = struct.unpack(f"<{len(content) // 4}I", content)
    return [data[at : data.index(b"\0", at)] for at in offsets]


def poke(data: bytes, at: int, value: int, code: str = "<I") -> bytes:
    """Return *data* with *value* written at offset *at*."""
    return data[:at] + struct.pack(code, value) + data[at + struct.calcsize(code) :]


def shown(data: bytes, folder: Path) -> list[str]:
    """Return what ldconfig prints of the cache *data*, which it must find faultless."""
    if LDCONFIG is None:
        pytest.skip("ldconfig is not on this machine")
    path = folder / "ld.so.cache"
    path.write_bytes(data)
    done = subprocess.run([LDCONFIG, "-p", "-C", path], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode("utf-8", "surrogateescape").splitlines()[1:]


LAYOUTS = ("new", "compat", "compat4", "old")


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_merged(layout: str, count: int, tmp_path: Path) -> None:
    """Odd and even counts differ in the padding between the two tables."""
    rows = [r for r in IMAGE[-count:] if layout != "old" or not r[4]]
    image = cache_file(rows, layout)
    assert parse(image) == rows
    merged = merge(image, OURS)
    assert parse(merged) == [r for r in MERGED if r in rows or r not in IMAGE]
    lines = shown(merged, tmp_path)
    assert "\tlibcuda.so (libc6,x86-64) => /opt/gpu/libcuda.so" in lines
    generated = [line for line in lines if line.startswith("Cache generated")]
    expected = [] if layout == "old" else [f"Cache generated by: {GENERATOR.decode()}"]
    assert generated == expected


@pytest.mark.parametrize("layout", ["new", "old"])
def test_the_output_is_the_new_layout_alone(layout: str) -> None:
    """All loaders since glibc 2.2 read it, and its offsets have one origin."""
    merged = merge(cache_file(IMAGE, layout), OURS)
    magic, count, length, order, at = struct.unpack_from("<20sIIB3xI12x", merged)
    assert (magic, count, order) == (b"glibc-ld.so.cache1.1", len(MERGED), 2)
    assert at == (48 + 24 * count + length + 3) & -4
    assert merged[48 + 24 * count + length - 1] == 0


def test_no_image_gives_a_cache_of_our_entries(tmp_path: Path) -> None:
    """Distroless images have none: the loader's default directories do the rest."""
    rows = [r for r in MERGED if r not in IMAGE]
    for image in (None, b""):
        assert parse(merge(image, OURS)) == rows
    assert len(shown(merge(None, OURS), tmp_path)) == len(rows)
    assert parse(merge(None, [])) == []


def test_fields_of_the_image_are_kept_as_they_are() -> None:
    """Legacy hwcap bits, foreign ABIs and OS versions mean something to some loader."""
    rows = [
        ("libx.so.2", "/a/libx.so.2", 0x803, 0, 0),
        ("libx.so.1", "/a/haswell/libx.so.1", X86, 0x20600, 0x0004000000000000),
        ("libx.so.1", "/a/libx.so.1", 0xFFFFFFFF, 0xFFFFFFFF, (1 << 64) - 1),
        ("liba.so", "elsewhere/\udcff", 0, 0, 0),
    ]
    assert [r for r in parse(merge(cache_file(rows), OURS)) if r in rows] == rows


def test_a_value_need_not_end_in_the_soname() -> None:
    """The loader opens whatever the value names: links may be missing."""
    entry = CacheEntry("libcuda.so.1", "/opt/gpu/libcuda.so.550.163.01", X86)
    again = CacheEntry("libcuda.so.1", "/opt/gpu/libcuda.so.550.163.01", 3)
    assert parse(merge(None, [entry, again])) == [
        ("libcuda.so.1", "/opt/gpu/libcuda.so.550.163.01", X86, 0, 0),
        ("libcuda.so.1", "/opt/gpu/libcuda.so.550.163.01", 3, 0, 0),
    ]


def test_merging_again_changes_nothing() -> None:
    """A restarted container must not see a rewritten, growing file."""
    for layout in LAYOUTS:
        merged = merge(cache_file(IMAGE[2:], layout), OURS)
        assert merge(merged, OURS) == merged


def test_another_driver_replaces_the_first() -> None:
    """After an upgrade nothing may name the old files, not even an unused string."""
    image = cache_file(IMAGE, hwcaps=["x86-64-v2", "x86-64-v3"])
    other = [CacheEntry("libcuda.so.1", "/opt/new/libcuda.so.1", X86)]
    replaced = merge(merge(image, OURS), other)
    assert replaced == merge(image, other)
    assert b"/opt/gpu" not in replaced


def test_no_entries_give_the_images_table_back() -> None:
    """Undoing an injection is merging nothing."""
    for layout in LAYOUTS:
        image = cache_file(IMAGE[2:], layout)
        undone = merge(merge(image, OURS), [])
        assert parse(undone) == parse(image)
        assert undone == merge(image, [])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_cut_anywhere_is_merged(layout: str, tmp_path: Path) -> None:
    """A full disk leaves such files; where the table is cut, loaders ignore all of it."""
    rows = IMAGE[2:]
    image = cache_file(rows, layout)
    empty = merge(None, OURS)
    ends = {"new": 0, "compat": 56, "compat4": 52, "old": 0}
    table = ends[layout] + (52 if layout == "old" else 120)
    for size in range(len(image)):
        merged = merge(image[:size], OURS)
        paths = [r[1] for r in parse(merged)]
        assert [p for p in paths if p.startswith("/opt/gpu/")] == [r[1] for r in parse(empty)]
        assert len(paths) in (3, 3 + len(rows))
        if size <= table and not (layout.startswith("compat") and size < ends[layout] + 20):
            assert merged == empty
        if size % 16 in (0, 1, 3) or size > table:
            shown(merged, tmp_path)


@pytest.mark.parametrize("count", [0, 1, 6, 1000, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("layout", ["new", "compat", "old"])
def test_a_wrong_entry_count_is_no_entry(layout: str, count: int, tmp_path: Path) -> None:
    """Counts beyond the file must not be believed; smaller ones are the loader's truth."""
    rows = IMAGE[2:]
    image = cache_file(rows, layout)
    at = {"new": 20, "compat": 56 + 20, "old": 12}[layout]
    merged = merge(poke(image, at, count), OURS)
    ours = parse(merge(None, OURS))
    assert [r for r in parse(merged) if r[1].startswith("/opt/gpu/")] == ours
    if count >= 1000:
        assert merged == merge(None, OURS)
    shown(merged, tmp_path)
    if layout == "compat":
        old_count = merge(poke(image, 12, count), OURS)
        assert parse(old_count)[: len(ours)] == ours
        shown(old_count, tmp_path)


@pytest.mark.parametrize("field", ["name", "value"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_offset_outside_the_strings_empties_the_cache(layout: str, field: str) -> None:
    """Offsets into the table or past the end would become other names when shifted."""
    rows = IMAGE[2:]
    image = cache_file(rows, layout)
    base = {"new": 0, "compat": 56, "compat4": 52, "old": 52}[layout]
    entry = 16 + 12 if layout == "old" else base + 48 + 24
    lead = 0 if layout == "old" else 48 + 24 * len(rows)
    place = entry + (4 if field == "name" else 8)
    assert len(parse(merge(poke(image, place, lead), OURS))) == len(rows) + len(OURS)
    beyond = len(image) - base
    assert len(parse(merge(poke(image, place, beyond - 1), OURS))) == len(rows) + len(OURS)
    bad = [beyond, 2**31, 2**32 - 1] + ([lead - 1, 0] if lead else [])
    for offset in bad:
        assert merge(poke(image, place, offset), OURS) == merge(None, OURS)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4, 0xFC, 0xFE])
def test_the_byte_order_is_judged_as_ldconfig_does(order: int, tmp_path: Path) -> None:
    """A loader ignores other orders: their entries must neither be swapped nor revived."""
    image = poke(cache_file(IMAGE), 28, order, "<B")
    if LDCONFIG is None:
        pytest.skip("ldconfig is not on this machine")
    (tmp_path / "image").write_bytes(image)
    done = subprocess.run(
        [LDCONFIG, "-p", "-C", tmp_path / "image"], capture_output=True, check=False
    )
    is_read = b"wrong endianness" not in done.stderr
    assert is_read == (order in (0, 2, 0xFE))
    assert merge(image, OURS) == merge(cache_file(IMAGE) if is_read else None, OURS)


def _damaged_extensions() -> dict[str, bytes]:
    good = cache_file(IMAGE, hwcaps=["x86-64-v2", "x86-64-v3"])
    (at,) = struct.unpack_from("<I", good, 32)
    first = at + 8
    many = cache_file(IMAGE, hwcaps=["v2"], sections=[(100 + i, b"") for i in range(32)])
    too_many = cache_file(IMAGE, hwcaps=[f"v{i}" for i in range(1025)])
    return {
        "offset 0": poke(good, 32, 0),
        "offset not aligned": poke(good, 32, at + 1),
        "offset past the end": poke(good, 32, len(good)),
        "offset at the last bytes": poke(good, 32, (len(good) - 4) & -4),
        "offset 2^32-4": poke(good, 32, 2**32 - 4),
        "wrong magic": poke(good, at, 0xEAA42175),
        "count 2^32-1": poke(good, at + 4, 2**32 - 1),
        "count past the end": poke(good, at + 4, 20),
        "33 sections": many,
        "a section past the end": poke(good, first + 24, 2**32 - 1),
        "a section that ends past the end": poke(good, first + 28, len(good)),
        "hwcaps of 3 bytes": poke(good, first + 12, 3),
        "hwcaps of no bytes": poke(good, first + 12, 0),
        "1025 hwcaps names": too_many,
        "an hwcaps name in the table": poke(good, at + 8 + 32, 60),
        "an hwcaps name past the end": poke(good, at + 8 + 32, len(good)),
    }


@pytest.mark.parametrize("case", _damaged_extensions())
def test_a_damaged_extension_costs_no_entry(case: str, tmp_path: Path) -> None:
    """The loader then does without hwcaps; the libraries themselves it still finds."""
    merged = merge(_damaged_extensions()[case], OURS)
    assert parse(merged) == MERGED
    assert hwcaps_of(merged) == []
    shown(merged, tmp_path)


def test_hwcaps_and_generator_survive(tmp_path: Path) -> None:
    """Without the names the image's own x86-64-v3 variants would no longer be chosen."""
    image = cache_file(IMAGE, hwcaps=["x86-64-v2", "x86-64-v3"])
    merged = merge(image, OURS)
    assert hwcaps_of(merged) == [b"x86-64-v2", b"x86-64-v3"]
    assert sections_of(merged)[0] == GENERATOR
    assert any('hwcap: "x86-64-v3"' in line for line in shown(merged, tmp_path))
    assert merge(merged, OURS) == merged


def test_hwcaps_names_that_follow_all_others_survive() -> None:
    """They belong to the strings in use, of which nothing may be cut off."""
    image = cache_file([row("libc.so.6")], hwcaps=["x86-64-v2", "x86-64-v4"])
    assert hwcaps_of(merge(image, OURS))[-1] == b"x86-64-v4"


def test_hwcaps_behind_an_old_table_stay_without_effect() -> None:
    """Loaders look for their names in the wrong place there; converting must not wake them."""
    image = cache_file(IMAGE, "compat", hwcaps=["x86-64-v2", "x86-64-v3"])
    merged = merge(image, OURS)
    assert parse(merged) == MERGED
    assert hwcaps_of(merged) == []
    assert sections_of(merged)[0] == GENERATOR


def test_a_generator_beyond_any_program_name_is_dropped() -> None:
    """It is copied into each merge, and an image could make it megabytes."""
    for size, kept in ((4096, True), (4097, False)):
        merged = merge(cache_file(IMAGE, sections=[(0, b"g" * size)]), OURS)
        assert (0 in sections_of(merged)) is kept


def test_our_mark_is_where_our_strings_begin() -> None:
    """The mark is the file format between two versions of us: it must not move."""
    merged = merge(cache_file(IMAGE), OURS)
    (start,) = struct.unpack("<I", sections_of(merged)[OURS_TAG])
    assert merged[start:].startswith(b"/opt/gpu/libnvidia-ml.so.1\0")
    assert merged[start - 1] == 0


@pytest.mark.parametrize("forged", ["0", "table", "end", "2^32-1", "twice", "long"])
def test_a_forged_mark_loses_nothing_of_the_image(forged: str) -> None:
    """The image may write our tag too; its own entries must not vanish by it."""
    plain = cache_file(IMAGE)
    mark = struct.pack("<I", 48 + 24 * len(IMAGE))
    contents = {
        "0": [bytes(4)],
        "table": [struct.pack("<I", 60)],
        "end": [struct.pack("<I", len(plain) + 100)],
        "2^32-1": [b"\xff" * 4],
        "twice": [mark, mark],
        "long": [mark * 2],
    }
    image = cache_file(IMAGE, sections=[(OURS_TAG, mark) for mark in contents[forged]])
    assert parse(merge(image, OURS)) == MERGED
    assert merge(merge(image, OURS), OURS) == merge(image, OURS)


def test_a_mark_in_the_middle_hides_only_what_lies_behind_it() -> None:
    """That is what our own mark does, and an image that writes it harms itself alone."""
    plain = cache_file(IMAGE)
    middle = plain.index(b"libc.so.6\0")
    image = cache_file(IMAGE, sections=[(OURS_TAG, struct.pack("<I", middle))])
    assert parse(merge(image, [])) == IMAGE[:3]


def test_an_old_table_before_the_mark_makes_it_void() -> None:
    """We never write one, so such a mark is not ours."""
    mark = struct.pack("<I", 56 + 48 + 24 * 3 + 1)  # in the file's strings, and below a value
    image = cache_file(IMAGE[2:], "compat", sections=[(OURS_TAG, mark)])
    assert parse(merge(image, [])) == IMAGE[2:]


def test_the_last_string_gets_its_end() -> None:
    """Without one, our first string would be glued to the image's last."""
    for layout in ("new", "compat", "old"):
        rows = [*IMAGE[2:4], row("libb.so.1", "/y")]
        image = cache_file(rows, layout, sections=())
        image = image[: image.rindex(b"/y/libb.so.1") + len("/y/libb.so.1")]
        merged = merge(image, OURS)
        assert row("libb.so.1", "/y") in parse(merged)
        assert merge(merged, OURS) == merged


def test_strings_may_share_their_tails() -> None:
    """Writers since glibc 2.33 store the name as the end of the path, and so do we."""
    merged = merge(None, OURS)
    assert merged.count(b"libcuda.so.1\0") == 1
    assert parse(merge(merge(None, OURS).replace(b"!UPG", b"\0\0\0\1"), [])) == parse(merged)


@pytest.mark.parametrize(
    ("soname", "path"),
    [
        ("", "/lib/x"),
        ("a\0b", "/lib/x"),
        ("libx.so", ""),
        ("libx.so", "lib/x"),
        ("libx.so", "/lib/\0"),
        ("x" * 4096, "/lib/x"),
        ("libx.so", "/" + "x" * 4096),
        ("\ud800", "/lib/x"),
    ],
)
def test_an_entry_that_no_cache_can_hold_is_refused(soname: str, path: str) -> None:
    """Silence would be a library that is never found."""
    with pytest.raises(LdcacheError, match="cannot cache"):
        merge(None, [CacheEntry(soname, path, X86)])


def test_what_a_loader_ignores_is_an_error_to_parse() -> None:
    """Discovery must say that a driver root's cache is broken, not find no driver in it."""
    for data in (b"", b"ELF", cache_file(IMAGE)[:47], poke(cache_file(IMAGE), 28, 3, "<B")):
        with pytest.raises(LdcacheError, match="loader"):
            parse(data)


def test_files_beyond_the_limit_are_refused() -> None:
    """An image of 100 GiB of zeros at that place must not fill the host's memory."""
    image = cache_file(IMAGE) + bytes(ldcache_format.MAX_CACHE_BYTES)
    for call in (lambda: merge(image, OURS), lambda: parse(image), lambda: merge(image, [])):
        with pytest.raises(LdcacheError, match="at most"):
            call()
    with pytest.raises(LdcacheError, match="at most"):
        lists_directory(image, "/lib")
    size = ldcache_format.MAX_CACHE_BYTES
    assert parse(merge((cache_file(IMAGE) + bytes(size))[:size], OURS)) == MERGED


def test_a_directory_is_listed_if_a_library_lies_directly_in_it() -> None:
    """A drop-in for a directory that ldconfig scans anyway would change the image's order."""
    rows = [row("liba.so", "/usr/lib/x"), row("libb.so", "/usr/lib/gpu/deep"), row("libc.so", "")]
    for layout in LAYOUTS:
        image = cache_file(rows, layout)
        listed = {
            d: lists_directory(image, d)
            for d in ("/usr/lib/x", "/usr/lib/x/", "/", "/usr/lib/gpu/deep")
        }
        assert set(listed.values()) == {True}
        for directory in ("/usr/lib", "/usr/lib/gpu", "/lib/x", "/usr", "/usr/lib/xx"):
            assert not lists_directory(image, directory)
    assert not lists_directory(None, "/usr/lib")
    assert not lists_directory(b"garbage", "/usr/lib")


def test_our_own_entries_list_no_directory() -> None:
    """Else the second start of a container would take the drop-in for unnecessary."""
    merged = merge(cache_file(IMAGE), OURS)
    assert not lists_directory(merged, "/opt/gpu")
    assert lists_directory(merged, "/usr/lib")


def test_a_name_is_no_directory_and_an_end_is_needed() -> None:
    """Only values count, and only whole ones: names and 5 KiB paths are no files."""
    rows = [("/dir/name", "/lib/x", X86, 0, 0), ("liby", "/far/" + "y" * 5000, X86, 0, 0)]
    image = cache_file([*rows, ("libd", "/empty/", X86, 0, 0)])
    assert not lists_directory(image, "/dir")
    assert not lists_directory(image, "/far")
    assert not lists_directory(image, "/empty")
