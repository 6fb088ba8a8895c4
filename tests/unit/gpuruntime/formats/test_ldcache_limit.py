# SPDX-License-Identifier: Apache-2.0
"""What is written to /etc/ld.so.cache can be read by the next start of the container."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from gpuruntime.errors import LdcacheError
from gpuruntime.formats import ldcache_merge
from gpuruntime.formats.ldcache import MAX_CACHE_BYTES
from gpuruntime.formats.ldcache_merge import ABI_FLAGS, CacheEntry
from gpuruntime.system.loader import LoaderCache
from gpuruntime.system.paths import Root

X86 = ABI_FLAGS["x86-64"]
DIRECTORY = "/opt/driver"
ENTRIES = tuple(
    CacheEntry(f"libcuda{i}.so.1", f"{DIRECTORY}/libcuda{i}.so.1", X86) for i in range(40)
)


def image_of(size: int) -> bytes:
    """Return a cache of *size* bytes, of which no loader and no reader needs less."""
    count = 1000
    lead = 48 + 24 * count
    strings = b"liba.so.1\0" + b"x" * (size - lead - 10)
    table = struct.pack("<IIIIQ", X86, lead, lead, 0, 0) * (count - 1)
    # The last entry's name ends with the file.
    table += struct.pack("<IIIIQ", X86, size - 2, size - 2, 0, 0)
    head = struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", count, len(strings), 2, 0)
    return (head + table + strings[:-1] + b"\0")[:size]


def image_of_old(count: int) -> bytes:
    """Return a cache in the old format, of 12 bytes an entry in place of 24."""
    table = struct.pack("<iII", 3, 0, 0) * count
    return b"ld.so-1.7.0\0" + struct.pack("<I", count) + table + b"liba.so.1\0"


@pytest.mark.parametrize("below", [0, 1, 100, 1000])
def test_what_would_be_too_large_is_refused(below: int) -> None:
    """It has more bytes than the image's own, which may have the most that are read."""
    image = image_of(MAX_CACHE_BYTES - below)
    assert ldcache_merge.parse(image)
    with pytest.raises(LdcacheError, match=f"{MAX_CACHE_BYTES} at most"):
        ldcache_merge.merge(image, ENTRIES)


@pytest.mark.parametrize("below", [3000, 4000, 100_000])
def test_what_is_not_can_be_merged_with_again(below: int) -> None:
    """The next start of the container comes to the same."""
    merged = ldcache_merge.merge(image_of(MAX_CACHE_BYTES - below), ENTRIES)
    assert MAX_CACHE_BYTES - below < len(merged) <= MAX_CACHE_BYTES
    assert ldcache_merge.merge(merged, ENTRIES) == merged


def test_a_table_that_grows_by_its_new_width() -> None:
    """The old format has half the bytes an entry."""
    image = image_of_old(MAX_CACHE_BYTES // 12 - 10)
    assert len(image) < MAX_CACHE_BYTES
    with pytest.raises(LdcacheError, match=r"cannot make the ld\.so\.cache"):
        ldcache_merge.merge(image, ENTRIES)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Return a root whose cache has the most that is read."""
    for name in ("etc", "proc", "sbin"):
        (tmp_path / name).mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(image_of(MAX_CACHE_BYTES))
    return Root(str(tmp_path))


def test_a_cache_that_would_be_too_large_is_not_written(root: Root, tmp_path: Path) -> None:
    """The container would start once, and then never again."""
    before = (tmp_path / "etc/ld.so.cache").read_bytes()
    with pytest.raises(LdcacheError) as caught:
        LoaderCache(ENTRIES).execute(root, pytest.fail)
    assert 'cannot write "/etc/ld.so.cache" in the container' in caught.value.message
    assert caught.value.hint == 'remove "/etc/ld.so.cache" from the image, or run ldconfig in it'
    assert (tmp_path / "etc/ld.so.cache").read_bytes() == before
    assert sorted(os.listdir(tmp_path / "etc")) == ["ld.so.cache"]


@pytest.mark.system
def test_the_host_s_ldconfig_makes_a_smaller_one(root: Root, tmp_path: Path) -> None:
    """Where it may be run, as for a cache that cannot be read at all."""
    LoaderCache(ENTRIES, ldconfig="/sbin/ldconfig").execute(root, pytest.fail)
    merged = (tmp_path / "etc/ld.so.cache").read_bytes()
    assert len(merged) < 100_000
    assert {row[1] for row in ldcache_merge.parse(merged)} == {entry.path for entry in ENTRIES}
