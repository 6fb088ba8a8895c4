# SPDX-License-Identifier: Apache-2.0
"""Who comes first in a merged loader cache, and what finding that out may cost."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from effort import IS_FULL

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache as ldcache_format
from gpuruntime.formats import ldcache_merge
from gpuruntime.formats.ldcache import compare, sort_key
from gpuruntime.formats.ldcache_merge import CacheEntry, merge, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).resolve().parents[4]
SAMPLE = ROOT / "tests" / "data" / "elf" / "libnameless.so"
LDCONFIG = shutil.which("ldconfig", path="/usr/sbin:/sbin")
X86 = ldcache_merge.ABI_FLAGS["x86-64"]
I386 = ldcache_merge.ABI_FLAGS["i386"]


def entry(name: str, directory: str = "/opt/gpu", flags: int = X86) -> CacheEntry:
    """Return an entry for *name* in *directory*."""
    return CacheEntry(name, f"{directory}/{name}", flags)


def as_bytes(name: str) -> bytes:
    """Return the bytes of a file name."""
    return name.encode("utf-8", "surrogateescape")


def image(*entries: CacheEntry) -> bytes:
    """Return an image's cache that holds *entries* in their order, sorted or not."""
    strings, table = b"", b""
    lead = 48 + 24 * len(entries)
    for item in entries:
        path, name = as_bytes(item.path), as_bytes(item.soname)
        places = lead + len(strings) + len(path) + 1, lead + len(strings)
        table += struct.pack("<IIIIQ", item.flags, *places, 0, 0)
        strings += path + b"\0" + name + b"\0"
    head = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", len(entries), len(strings), 2, 0)
    return head + table + strings


def paths(data: bytes) -> list[str]:
    """Return the values of a cache, in its order."""
    return [value for _, value, *_ in parse(data)]


def loader_finds(data: bytes, name: str, flags: int = X86) -> str | None:
    """Return the path that a loader takes from the cache *data* for *name*."""
    rows = parse(data)
    key = sort_key(as_bytes(name))
    keys = [sort_key(as_bytes(r[0])) for r in rows]
    low, high = 0, len(rows) - 1
    while low <= high:
        middle = (low + high) // 2
        order = compare(key, keys[middle])
        if order == 0:
            while middle > 0 and keys[middle - 1] == key:
                middle -= 1
            same = [r for r, k in zip(rows[middle:], keys[middle:], strict=True) if k == key]
            return next((r[1] for r in same if r[2] == flags), None)
        if order < 0:
            low = middle + 1
        else:
            high = middle - 1
    return None


@pytest.mark.parametrize(
    ("above", "below"),
    [
        pytest.param(b"libx.so.10", b"libx.so.9", id="numbers by value"),
        pytest.param(b"libx.so.1.10", b"libx.so.1.9", id="each run is a number"),
        pytest.param(b"libx.so.1", b"libx.so.x", id="digit above letter"),
        pytest.param(b"libx.so.1", b"libx.so.\x7f", id="digit above the highest character"),
        pytest.param(b"libx1", b"libx", id="digit above the end"),
        pytest.param(b"libxa", b"libx", id="letter above the end"),
        pytest.param(b"libx", b"libx\x80", id="the end above a negative character"),
        pytest.param(b"libxa", b"libx\xff", id="characters are signed"),
        pytest.param(b"libx\xff", b"libx\x80", id="negative ones have an order"),
        pytest.param(b"libx0", b"libx4294967295", id="numbers wrap at 32 bits"),
        pytest.param(b"libx2147483647", b"libx0", id="the highest number"),
        pytest.param(b"libx0", b"libx2147483649", id="the lowest number"),
        pytest.param(b"libx3000000000", b"libx2147483647", id="differences wrap"),
        pytest.param(b"lib10a", b"lib9b", id="a number before what follows it"),
    ],
)
def test_names_compare_as_in_the_loader(above: bytes, below: bytes) -> None:
    """The order of the table is the loader's way to a name."""
    assert compare(sort_key(above), sort_key(below)) > 0
    assert compare(sort_key(below), sort_key(above)) < 0


@pytest.mark.parametrize(
    ("one", "other"),
    [(b"libq.so.01", b"libq.so.1"), (b"lib4294967297", b"lib1"), (b"lib.so.0", b"lib.so.000")],
)
def test_names_of_equal_numbers_are_the_same_name(one: bytes, other: bytes) -> None:
    """A loader that is asked for libq.so.1 takes libq.so.01."""
    assert compare(sort_key(one), sort_key(other)) == 0
    merged = merge(image(entry(one.decode(), "/lib")), [entry(other.decode())])
    assert paths(merged) == [f"/opt/gpu/{other.decode()}", f"/lib/{one.decode()}"]


def test_ldconfig_orders_the_case_table_alike(tmp_path: Path) -> None:
    """Our comparison is written from reading: the machine's own ldconfig is the judge."""
    names = ["10", "9", "1.10", "1.9", "x", "1.x", "\x7f", "", "a", "\udc80", "\udcff", "007", "6"]
    files = [f"libx.so{name}" for name in names]
    written = parse(ldconfig(tmp_path, {"/lib": files}))
    assert len(written) == len(names)
    assert [r[0] for r in written] == [
        r[0] for r in parse(merge(None, [entry(name) for name in files]))
    ]


def ldconfig(root: Path, libraries: dict[str, list[str]]) -> bytes:
    """Return the cache that ldconfig writes for *libraries*, {directory: file names}."""
    if LDCONFIG is None:
        pytest.skip("ldconfig is not on this machine")
    content = SAMPLE.read_bytes()
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "ld.so.conf").write_text("".join(f"{d}\n" for d in libraries))
    for directory, names in libraries.items():
        (root / directory[1:]).mkdir(parents=True, exist_ok=True)
        for name in names:
            (root / directory[1:] / name).write_bytes(content)
    done = subprocess.run([LDCONFIG, "-X", "-r", root], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return (root / "etc" / "ld.so.cache").read_bytes()


def nasty_names(generator: random.Random, count: int) -> list[str]:
    """Return different names, no two equal to a loader, that differ where order is subtle."""
    pieces = ["0", "1", "9", "10", "09", "12345678", ".", "-", "_", "a", "A", "~", "so", "\udcff"]
    found: dict[tuple[int, ...], str] = {}
    while len(found) < count:
        name = "lib" + "".join(generator.choices(pieces, k=generator.randrange(1, 6)))
        name += ".so" + "".join(generator.choices(pieces[:10], k=generator.randrange(3)))
        if all(int(run) < 1 << 31 for run in re.findall("[0-9]+", name)):  # else no order exists
            found[sort_key(as_bytes(name))] = name
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4 if IS_FULL else 1))
def test_the_table_is_ldconfigs_own(seed: int, tmp_path: Path) -> None:
    """Order and values are what ldconfig writes with our directory listed first."""
    generator = random.Random(seed)
    names = nasty_names(generator, 330)
    theirs = names[:300]
    ours = names[300:] + generator.sample(theirs, 60)
    plain = ldconfig(tmp_path / "image", {"/far": theirs[:40], "/lib": theirs})
    both = ldconfig(tmp_path / "both", {"/opt/gpu": ours, "/far": theirs[:40], "/lib": theirs})
    generator.shuffle(ours)
    merged = merge(plain, [entry(name) for name in ours])
    assert parse(merged) == parse(both)
    for name in names:
        assert loader_finds(merged, name) == loader_finds(both, name)


def test_our_entries_precede_all_variants_of_their_name() -> None:
    """Behind the image's x86-64-v3 variant, the container would run a stub of another driver."""
    stub = entry("libcuda.so.1", "/usr/lib/glibc-hwcaps/x86-64-v3")
    merged = merge(image(stub, entry("libcuda.so.1", "/usr/lib")), [entry("libcuda.so.1")])
    assert paths(merged)[0] == "/opt/gpu/libcuda.so.1"


def test_both_abis_of_a_name_are_found() -> None:
    """A 32-bit game and a 64-bit one ask for the same SONAME."""
    ours = [entry("libcuda.so.1", "/gpu32", I386), entry("libcuda.so.1", "/gpu64")]
    merged = merge(image(entry("libcuda.so.1", "/lib32", I386)), ours)
    assert paths(merged) == [f"{d}/libcuda.so.1" for d in ("/gpu64", "/gpu32", "/lib32")]
    assert loader_finds(merged, "libcuda.so.1", I386) == "/gpu32/libcuda.so.1"


def test_equal_names_of_ours_stay_in_the_order_given() -> None:
    """The driver's own order of directories is a choice that somebody made."""
    ours = [entry("libq.so.01", "/b"), entry("libq.so.1", "/a"), entry("libq.so.1", "/c")]
    assert paths(merge(None, ours)) == ["/b/libq.so.01", "/a/libq.so.1", "/c/libq.so.1"]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 7, 8])
def test_names_find_their_place_in_a_table_of_any_size(size: int) -> None:
    """First, last, several in one gap, and no table at all are the edges of a search."""
    theirs = [entry(f"libm{n}.so", "/lib") for n in reversed(range(size))]
    names = ["liba.so", "libb.so", "libm3.so", "libm3.so.1", "libm3a.so", "libz.so", "libzz.so"]
    ours = [entry(name) for name in names]
    random.Random(size).shuffle(ours)
    merged = merge(image(*theirs), ours)
    expected = sorted([*ours, *theirs], key=lambda e: sort_key(e.soname.encode()), reverse=True)
    assert paths(merged) == [e.path for e in expected]
    assert all(loader_finds(merged, name) == f"/opt/gpu/{name}" for name in names)


def test_an_unsorted_table_is_sorted_where_needed() -> None:
    """Some writers got offsets wrong, so that their tables have no order: ours is still found."""
    generator = random.Random(4)
    for _ in range(50):
        names = nasty_names(generator, 40)
        theirs = [entry(name, "/lib") for name in names]
        ours = [entry(name) for name in generator.sample(names, 5)] + [entry("libnew.so.1")]
        merged = merge(image(*theirs), ours)
        for item in ours:
            assert loader_finds(merged, item.soname) == item.path
        kept = [path for path in paths(merged) if path.startswith("/lib/")]
        assert sorted(kept) == sorted(e.path for e in theirs)
        assert merge(merged, ours) == merged


def test_a_table_in_order_is_never_touched_by_sorting() -> None:
    """Equal names keep the image's order, whatever it is: it decides what a program gets."""
    theirs = [entry("libz.so", "/b"), entry("libz.so", "/a", I386), entry("libz.so", "/c")]
    assert paths(merge(image(*theirs), [entry("liba.so")]))[:3] == [e.path for e in theirs]
    disorder = [entry("liba.so", "/x"), *theirs, entry("libm.so", "/x")]
    merged = merge(image(*disorder), [entry("liba.so")])
    assert [p for p in paths(merged) if p.endswith("libz.so")] == [e.path for e in theirs]


def test_names_without_an_order_are_an_error() -> None:
    """Numbers that far apart go in a circle: no table exists in which all three are found."""
    theirs = [entry("libx.so.2952790016", "/lib")]
    with pytest.raises(LdcacheError, match=r'"libx[.]so[.][0-9]+" .* no order'):
        merge(image(*theirs), [entry("libx.so.1610612736"), entry("libx.so.3489660928")])
    assert loader_finds(merge(image(*theirs), [entry("liba.so")]), "liba.so")


KEPT = "/usr/local/cuda/compat"


def test_directories_of_the_image_may_stay_first() -> None:
    """CUDA images list their compat libraries before anything of the host's."""
    compat, stub = entry("libcuda.so.1", KEPT), entry("libcuda.so.1", "/usr/lib")
    ours = [entry("libcuda.so.1"), entry("libcuda.so")]
    data = image(compat, stub, entry("libc.so.6", "/lib"))
    merged = merge(data, ours, keep_first=[KEPT + "/"])
    assert paths(merged) == [
        *(compat.path, "/opt/gpu/libcuda.so.1", stub.path),
        *("/opt/gpu/libcuda.so", "/lib/libc.so.6"),
    ]
    assert merge(merged, ours, keep_first=[KEPT]) == merged
    assert paths(merge(merged, ours))[0] == "/opt/gpu/libcuda.so.1"
    assert paths(merge(data, ours, keep_first=["/usr/local/cuda"]))[0] == "/opt/gpu/libcuda.so.1"


def test_what_stays_first_stays_so_in_an_unsorted_table() -> None:
    """Sorting keeps the image's order of equal names, and the rule applies to the result."""
    compat = entry("libcuda.so.1", KEPT)
    others = [entry(f"lib{c}.so", "/lib") for c in "zacybx"]
    merged = merge(image(*others, compat), [entry("libcuda.so.1")], keep_first=[KEPT])
    assert loader_finds(merged, "libcuda.so.1") == compat.path
    assert "/opt/gpu/libcuda.so.1" in paths(merged)


def big_image(count: int, name: Callable[[int], str]) -> bytes:
    """Return a cache with *count* entries, the names highest first."""
    names = [name(i).encode() for i in reversed(range(count))]
    lead = 48 + 24 * count
    strings = bytearray()
    table = bytearray()
    for text in names:
        table += struct.pack("<IIIIQ", X86, lead + len(strings), lead + len(strings), 0, 0)
        strings += text + b"\0"
    head = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", count, len(strings), 2, 0)
    return head + bytes(table + strings)


def calls_of(function: Callable[[], object]) -> int:
    """Count the Python functions that *function* calls: its cost without a clock."""
    count = 0

    def count_call(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


DRIVER = [entry(f"libnvidia-{name}.so.550.163.01") for name in "abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.slow
def test_a_merge_looks_at_few_entries() -> None:
    """The engine waits: a hundred times the entries may cost a few steps of a search more."""
    small = big_image(2_000, lambda i: f"libm{i}.so")
    large = big_image(200_000, lambda i: f"libm{i}.so")
    cost = calls_of(lambda: merge(small, DRIVER))
    assert cost < 10_000
    assert calls_of(lambda: merge(large, DRIVER)) < 2 * cost
    again = merge(large, DRIVER)
    assert calls_of(lambda: merge(again, DRIVER)) < 2 * cost


@pytest.mark.slow
def test_a_group_of_all_entries_is_walked_once() -> None:
    """The loader walks to the first of equal names; 300,000 of ours are such a group."""
    count = ldcache_format.MAX_CACHE_BYTES // 24 - 20
    lead = 48 + 24 * count
    table = struct.pack("<IIIIQ", X86, lead, lead, 0, 0) * count
    head = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", count, 14, 2, 0)
    full = head + table + b"libcuda.so.1\0"
    merged = merge(full, [entry("libcuda.so.1")])
    assert paths(merged)[0] == "/opt/gpu/libcuda.so.1"
    assert len(paths(merged)) == count + 1


def overlapping(fill: bytes, steps: Iterable[int]) -> bytes:
    """Return a cache whose names are all the ends of one long string."""
    strings = fill + b"\0"
    offsets = list(steps)
    lead = 48 + 24 * len(offsets)
    table = b"".join(struct.pack("<IIIIQ", X86, lead + at, lead, 0, 0) for at in offsets)
    head = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", len(offsets), len(strings), 2, 0)
    return head + table + strings


@pytest.mark.slow
def test_overlapping_names_cannot_fill_the_memory() -> None:
    """100,000 names of 4 KiB fit into a 2.5 MB file; reading all of them would be 400 MB."""
    data = overlapping(b"0" * 110_000 + b"1", range(100_000))
    with pytest.raises(LdcacheError, match="bytes of names"):
        merge(data, [entry("0")])
    with pytest.raises(LdcacheError, match="bytes of names"):
        parse(data)


def test_a_string_without_end_has_no_effect_on_other_names() -> None:
    """Names are read up to 4 KiB; nothing longer can be asked for."""
    data = overlapping(b"z" * (2 << 20), range(100))
    assert paths(merge(data, [entry("libcuda.so.1")]))[-1] == "/opt/gpu/libcuda.so.1"


def test_nothing_is_imported_but_what_the_start_path_may() -> None:
    """Each import is paid at every container start; without site, as hooks run."""
    code = (
        "import sys; before = set(sys.modules); sys.path.append(sys.argv[1]);"
        "import gpuruntime.formats.ldcache_merge, gpuruntime.formats.elf;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c", code, str(ROOT)],
        capture_output=True,
        check=True,
        text=True,
    )
    formats = ("formats", "formats.elf", "formats.ldcache", "formats.ldcache_merge")
    ours = {f"gpuruntime.{name}" for name in ("errors", "record", *formats)}
    allowed = {"__future__", "_struct", "_operator", "gpuruntime", "itertools", "struct"}
    assert ours <= set(done.stdout.split()) <= ours | allowed
