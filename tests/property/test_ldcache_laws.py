# SPDX-License-Identifier: Apache-2.0
"""Laws of the loader cache merge, on generated tables and on damaged files of ldconfig's."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from effort import tries
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from gpuruntime.errors import LdcacheError
from gpuruntime.formats.ldcache import sort_key
from gpuruntime.formats.ldcache_merge import (
    ABI_FLAGS,
    CacheEntry,
    listed_directories,
    merge,
    parse,
)

pytestmark = pytest.mark.property

SAMPLES = Path(__file__).resolve().parents[1] / "data" / "elf"
LDCONFIG = shutil.which("ldconfig", path="/usr/sbin:/sbin")
X86 = ABI_FLAGS["x86-64"]
LAYOUTS = ("new", "compat", "old")

PROFILE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAMES = st.text("019.-azA\udc80\udcff", min_size=1, max_size=9).map(lambda text: f"lib{text}.so")
FLAGS = st.sampled_from(sorted(ABI_FLAGS.values()))
ENTRIES = st.lists(
    st.builds(lambda name, flags: CacheEntry(name, f"/opt/gpu/{name}", flags), NAMES, FLAGS),
    max_size=12,
)
ROWS = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(["/lib/a", "/usr/lib/b.so.1", "/lib/a\udcff", "relative"]),
        FLAGS,
        st.sampled_from([0, 0x20600, 0xFFFFFFFF]),
        st.sampled_from([0, 1 << 50, 1 << 62, (1 << 64) - 1]),
    ),
    max_size=25,
)
Row = tuple[str, str, int, int, int]


def encoded(text: str) -> bytes:
    """Return the bytes of a file name."""
    return text.encode("utf-8", "surrogateescape")


def cache_file(rows: list[Row]) -> bytes:
    """Return an image's cache with *rows* as they are."""
    lead = 48 + 24 * len(rows)
    table, strings = b"", b""
    for name, value, *fields in rows:
        path = lead + len(strings)
        strings += encoded(value) + b"\0"
        table += struct.pack("<IIIIQ", fields[0], lead + len(strings), path, *fields[1:])
        strings += encoded(name) + b"\0"
    head = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", len(rows), len(strings), 2, 0)
    return head + table + strings + b"\0"


@settings(PROFILE, max_examples=tries(400))
@given(rows=ROWS, first=ENTRIES, second=ENTRIES)
def test_a_merge_leaves_no_trace_of_the_one_before(
    rows: list[Row], first: list[CacheEntry], second: list[CacheEntry]
) -> None:
    """Restart, driver change and undo all follow from it."""
    rows.sort(key=lambda row: sort_key(encoded(row[0])), reverse=True)
    image = cache_file(rows)
    merged = merge(image, first)
    assert merge(merged, first) == merged
    assert merge(merged, second) == merge(image, second)
    assert parse(merge(merged, [])) == rows


@settings(PROFILE, max_examples=tries(400))
@given(rows=ROWS, first=ENTRIES, second=ENTRIES)
def test_an_unsorted_table_loses_nothing_but_its_disorder(
    rows: list[Row], first: list[CacheEntry], second: list[CacheEntry]
) -> None:
    """Sorting cannot be undone; entries and the bytes of a second merge are the same."""
    image = cache_file(rows)
    merged = merge(image, first)
    assert merge(merged, first) == merged
    for undone in (merge(merged, []), merge(merge(merged, second), [])):
        assert sorted(parse(undone)) == sorted(rows)
    assert parse(merge(image, [])) == rows


@settings(PROFILE, max_examples=tries(400))
@given(rows=ROWS, ours=ENTRIES)
def test_a_sorted_table_keeps_its_order_with_ours_in_front(
    rows: list[Row], ours: list[CacheEntry]
) -> None:
    """The image's own precedence among its libraries is none of our business."""
    rows.sort(key=lambda row: sort_key(encoded(row[0])), reverse=True)
    merged = parse(merge(cache_file(rows), ours))
    assert [row for row in merged if not row[1].startswith("/opt/gpu/")] == rows
    assert len(merged) == len(rows) + len(ours)
    places = [(sort_key(encoded(row[0])), row[1].startswith("/opt/gpu/")) for row in merged]
    assert places == sorted(places, reverse=True)
    assert sorted((r[0], r[1], r[2]) for r in merged if r[1].startswith("/opt/gpu/")) == sorted(
        (entry.soname, entry.path, entry.flags) for entry in ours
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the caches that the machine's ldconfig writes, {layout: bytes}."""
    if LDCONFIG is None:
        pytest.skip("ldconfig is not on this machine")
    root = tmp_path_factory.mktemp("root")
    (root / "etc").mkdir()
    (root / "etc" / "ld.so.conf").write_text("/usr/lib/a\n/usr/lib/b\n")
    content = (SAMPLES / "libnameless.so").read_bytes()
    for directory in ("a", "b", "a/glibc-hwcaps/x86-64-v2", "a/glibc-hwcaps/x86-64-v3"):
        folder = root / "usr" / "lib" / directory
        folder.mkdir(parents=True)
        for name in ("libc.so.6", "libcuda.so.1", f"lib{directory[-1]}.so", "libz.so.1.2"):
            (folder / name).write_bytes(content)
    caches = {}
    for layout in LAYOUTS:
        subprocess.run([LDCONFIG, "-X", "-c", layout, "-r", root], check=True)
        caches[layout] = (root / "etc" / "ld.so.cache").read_bytes()
        assert len(parse(caches[layout])) >= 8
    return caches


WORDS = st.one_of(
    st.sampled_from([0, 1, 2, 47, 48, 60, 2**31 - 1, 2**31, 2**32 - 1, 0x47505521, 0xEAA42174]),
    st.integers(0, 2000),
    st.integers(0, 2**32 - 1),
)
DAMAGE = st.lists(
    st.tuples(st.sampled_from(["word", "byte", "cut", "insert"]), st.floats(0, 1), WORDS),
    min_size=1,
    max_size=6,
)


def damaged(data: bytes, damage: list[tuple[str, float, int]]) -> bytes:
    """Return *data* with each of *damage* done to it."""
    for kind, place, value in damage:
        at = int(place * len(data))
        if kind == "word":
            at &= -4
            data = data[:at] + struct.pack("<I", value) + data[at + 4 :]
        elif kind == "byte":
            data = data[:at] + bytes([value & 255]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] if value % 8 == 0 else data
        else:
            data = data[:at] + struct.pack("<I", value) * (value % 5) + data[at:]
    return data


OURS = [
    CacheEntry("libcuda.so.1", "/opt/gpu/libcuda.so.550.163.01", X86),
    CacheEntry("libnvidia-ml.so.1", "/opt/gpu/libnvidia-ml.so.1", X86),
    CacheEntry("libaaa.so", "/opt/gpu/libaaa.so", X86),
    CacheEntry("libzzz.so", "/opt/gpu/libzzz.so", X86),
]


@settings(PROFILE, max_examples=tries(1500))
@given(layout=st.sampled_from(LAYOUTS), damage=DAMAGE)
def test_a_damaged_file_never_breaks_a_merge(
    written: dict[str, bytes], layout: str, damage: list[tuple[str, float, int]]
) -> None:
    """Whatever an image's file holds, ours are in the result, and the next merge agrees."""
    image = damaged(written[layout], damage)
    merged = merge(image, OURS)
    rows = parse(merged)
    assert {(entry.soname, entry.path) for entry in OURS} <= {row[:2] for row in rows}
    assert merge(merged, OURS) == merged
    listed_directories(image, ["/usr/lib/a"])
    assert not listed_directories(merge(None, OURS), ["/opt/gpu"])
    try:
        shown = parse(image)
    except LdcacheError:
        event("ignored")
        assert merged == merge(None, OURS)
    else:
        event("accepted")
        if b"!UPG" not in image:  # our mark, by chance
            assert sorted(shown) == sorted(parse(merge(image, [])))


@settings(PROFILE, max_examples=tries(300))
@given(layout=st.sampled_from(LAYOUTS), damage=DAMAGE)
def test_ldconfig_accepts_each_result(
    written: dict[str, bytes],
    tmp_path: Path,
    layout: str,
    damage: list[tuple[str, float, int]],
) -> None:
    """A file that it calls malformed would be our fault in the eyes of whoever looks."""
    assert LDCONFIG is not None
    image = damaged(written[layout], damage)
    assume(image != written[layout])
    path = tmp_path / "ld.so.cache"
    path.write_bytes(merge(image, OURS))
    done = subprocess.run([LDCONFIG, "-p", "-C", path], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\tlibcuda.so.1 (libc6,x86-64) => /opt/gpu/libcuda.so.550.163.01\n" in done.stdout
