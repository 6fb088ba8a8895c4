# SPDX-License-Identifier: Apache-2.0
"""The file format of the loader cache (/etc/ld.so.cache): read it, write it, order its names.

On the start path; pure. Files come from images and are hostile: work and memory are bounded by
the limits below. Little-endian hosts and caches only: NVIDIA has drivers for no others.
"""

from __future__ import annotations

import _struct
from _operator import sub
from itertools import compress

from gpuruntime.errors import LdcacheError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_CACHE_BYTES = 8 << 20  # the largest real ones have some 10,000 entries in 1 MiB
MAX_NAME_BYTES = 4096
MAX_DECODED_BYTES = 4 << 20  # names may overlap: the file's size does not bound their sum
MAX_GENERATOR_BYTES = 4096
MAX_HWCAPS_NAMES = 1024
MAX_SECTIONS = 32

_OLD_MAGIC = b"ld.so-1.7.0"
_OLD_HEADER_BYTES = 16
_OLD_ENTRY_BYTES = 12
_MAGIC = b"glibc-ld.so.cache1.1"
HEADER = _struct.Struct("<20sIIB3xI12x")  # magic, count, bytes of strings, byte order, extension
ENTRY = _struct.Struct("<IIIIQ")  # flags, name, value, osversion, hwcap
_ENTRY_WORDS = 6
_FLAGS, _NAME, _VALUE = range(3)
_LITTLE_ENDIAN = 2
_BYTE_ORDER_MASK = 3

_EXTENSION_MAGIC = 0xEAA42174
_EXTENSION = _struct.Struct("<II")  # magic, count
_SECTION = _struct.Struct("<IIII")  # tag, flags, offset, bytes
_GENERATOR = 0
_HWCAPS = 1
_OURS = 0x47505521  # 4 bytes: the start of our strings; loaders skip unknown tags
_NO_SECTION = (0, 0)


# The difference of two numbers below this limit does not wrap.
_WIDE = 1 << 30
_DIGIT, _NO_DIGIT = b"0", b"x"
# Byte → which of the two it is, and its value as a signed character, moved up to be none below 0.
_KINDS = _NO_DIGIT * 0x30 + _DIGIT * 10 + _NO_DIGIT * (0x100 - 0x3A)
_SIGNED = bytes([*range(0x80, 0x100), *range(0x80)])


class Cache:
    """The image's part of a cache: its entries as they are in the file, and their strings.

    A name or value field less *lead* is a position in *tail*; *hwcaps* holds such positions.
    """

    __slots__ = ("generator", "hwcaps", "lead", "table", "tail")

    def __init__(
        self,
        table: bytes = b"",
        lead: int = 0,
        tail: bytes = b"",
        hwcaps: Sequence[int] = (),
        generator: bytes = b"",
    ) -> None:
        self.table = table
        self.lead = lead
        self.tail = tail
        self.hwcaps = hwcaps
        self.generator = generator

    def rows(self) -> Rows:
        """Return the entries, their strings as positions in the tail."""
        return Rows(self.table, self.lead)


class Rows:
    """The entries of a table by index. No lists are made: a search reads only a few entries."""

    __slots__ = ("_lead", "_words")

    def __init__(self, table: bytes, lead: int) -> None:
        self._words = memoryview(table).cast("I")
        self._lead = lead

    def __len__(self) -> int:
        return len(self._words) // _ENTRY_WORDS

    def flags(self, index: int) -> int:
        """Return the flags field of entry *index*."""
        return self._words[index * _ENTRY_WORDS]

    def name(self, index: int) -> int:
        """Return the position of the name of entry *index*."""
        return self._words[index * _ENTRY_WORDS + _NAME] - self._lead

    def value(self, index: int) -> int:
        """Return the position of the value of entry *index*."""
        return self._words[index * _ENTRY_WORDS + _VALUE] - self._lead


class Names:
    """The names in a string area, each decoded once.

    All methods raise `LdcacheError` beyond `MAX_DECODED_BYTES` of names.
    """

    __slots__ = ("_keys", "_left", "_strings", "_texts", "compare")

    def __init__(self, strings: bytes) -> None:
        # The function that compares two of their keys.
        self.compare: Callable[[tuple[int, ...], tuple[int, ...]], int] = compare_narrow
        self._strings = strings
        self._left = MAX_DECODED_BYTES
        self._keys: dict[int, tuple[int, ...]] = {}
        self._texts: dict[int, str] = {}

    def key(self, at: int) -> tuple[int, ...]:
        """Return the sort key of the name at position *at*."""
        key = self._keys.get(at)
        if key is None:
            key = self._keys[at] = self.checked(sort_key(self._read(at)))
        return key

    def checked(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """Return *key* after preparing the comparison for it."""
        if max(key) >= _WIDE or min(key) < -_WIDE:
            self.compare = compare
        return key

    def text(self, at: int) -> str:
        """Return the name at position *at*."""
        text = self._texts.get(at)
        if text is None:
            text = self._texts[at] = self._read(at).decode("utf-8", "surrogateescape")
        return text

    def _read(self, at: int) -> bytes:
        end = self._strings.find(b"\0", at, at + MAX_NAME_BYTES)
        name = self._strings[at : end if end >= 0 else at + MAX_NAME_BYTES]
        self._left -= len(name)
        if self._left < 0:
            raise LdcacheError(
                f"cannot read the ld.so.cache: more than {MAX_DECODED_BYTES} bytes of names"
            )
        return name


def sort_key(name: bytes) -> tuple[int, ...]:
    """Return the tuple by which the table is ordered, from the highest down.

    Bytes count as signed characters, a run of digits as one 32-bit number that ranks above any
    character. Hence libx.so.10 is above libx.so.9, and libx.so.01 the same name as libx.so.1.
    """
    # By runs of bytes: a loop over each byte would cost more than the search.
    kinds = name.translate(_KINDS)
    signed = name.translate(_SIGNED)
    key: list[int] = []
    at = 0
    while True:
        start = kinds.find(_DIGIT, at)
        if start < 0:
            key += signed[at:]
            break
        key += signed[at:start]
        at = kinds.find(_NO_DIGIT, start)
        if at < 0:
            at = len(name)
        number = int(name[start:at]) & 0xFFFFFFFF
        key += (0x100, (number ^ 0x80000000) - 0x80000000)
    key.append(0x80)  # the end, a character of value 0
    return tuple(key)


def compare(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Compare two sort keys as the loader does: below, at or above 0.

    Like tuples, but for numbers: their difference is taken in 32 bits and wraps.
    """
    if left == right:
        return 0
    difference = next(filter(None, map(sub, left, right)), 0)
    return ((difference + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def compare_narrow(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Do what `compare` does for keys of smaller numbers, whose differences do not wrap."""
    return (left > right) - (left < right)


def values(cache: Cache) -> set[int]:
    """Return the positions of all values in the tail of *cache*."""
    return {offset - cache.lead for offset in _column(cache.table, _VALUE)}


def _column(table: bytes, field: int) -> list[int]:
    return memoryview(table).cast("I")[field::_ENTRY_WORDS].tolist()


def shift(table: bytes, amount: int) -> bytes:
    """Add *amount* to each name and value offset of *table*.

    One addition of two long integers in place of a loop. No field overflows into its neighbour,
    for each offset lies within a file of `MAX_CACHE_BYTES` before and after.
    """
    ones = int.from_bytes(ENTRY.pack(0, 1, 1, 0, 0) * (len(table) // ENTRY.size), "little")
    moved = int.from_bytes(table, "little") + amount * ones
    return moved.to_bytes(len(table), "little")


def read_cache(data: bytes, *, keep_ours: bool = False) -> Cache | None:
    """Return the cache in *data* without the entries of an earlier merge.

    None for what a loader would ignore. Raises `LdcacheError` for more than `MAX_CACHE_BYTES`.
    """
    if len(data) > MAX_CACHE_BYTES:
        message = f"cannot read the ld.so.cache: {len(data)} bytes, {MAX_CACHE_BYTES} at most"
        raise LdcacheError(message)
    place = _locate(data)
    if place is None:
        return None
    start, origin, count, size = place
    end = start + count * size
    table = data[start:end] if size == ENTRY.size else _widen(data[start:end], count)
    lead = end - origin
    offsets = _column(table, _NAME) + _column(table, _VALUE)
    if offsets and (min(offsets) < lead or max(offsets) >= len(data) - origin):
        return None

    sections = _sections(data, origin) if size == ENTRY.size else {}
    # glibc writes the offsets of the hwcaps names from the header on, and reads them from the
    # file's start: after an old table they never worked, and must not start to work.
    hwcaps = _hwcaps(data, end, sections) if origin == 0 else ()
    at, length = sections.get(_GENERATOR, _NO_SECTION)
    generator = data[at : at + length] if length <= MAX_GENERATOR_BYTES else b""

    at, length = sections.get(_OURS, _NO_SECTION)
    if length == 4 and origin == 0 and not keep_ours:
        (ours,) = _struct.unpack_from("<I", data, at)
        if end <= ours < len(data):
            table = _without(table, ours)
            offsets = _column(table, _NAME) + _column(table, _VALUE)

    # The strings end after the last one in use: our own and the old extension are dropped.
    last = max(max(offsets, default=-1) - lead, max(hwcaps, default=-1))
    tail = b""
    if last >= 0:
        stop = data.find(b"\0", end + last)
        tail = data[end : stop + 1] if stop >= 0 else data[end:] + b"\0"
    return Cache(table, lead, tail, hwcaps, generator)


def _locate(data: bytes) -> tuple[int, int, int, int] | None:
    """Return (table, origin of offsets, entry count, entry size), None if loaders ignore it."""
    size = len(data)
    base = 0
    if data.startswith(_OLD_MAGIC) and size > _OLD_HEADER_BYTES:
        (count,) = _struct.unpack_from("<I", data, 12)
        if (size - _OLD_HEADER_BYTES) // _OLD_ENTRY_BYTES < count:
            return None
        end = _OLD_HEADER_BYTES + _OLD_ENTRY_BYTES * count
        # Older i386 writers align the second header to 4, all others to 8.
        aligned = ((end + 7) & -8, (end + 3) & -4)
        base = next((at for at in aligned if data.startswith(_MAGIC, at)), 0)
        if not base:
            return _OLD_HEADER_BYTES, end, count, _OLD_ENTRY_BYTES
    elif not data.startswith(_MAGIC):
        return None
    room = size - base - HEADER.size
    if room <= 0:
        return None
    _, count, _, order, _ = HEADER.unpack_from(data, base)
    # A byte order of 0 is from writers before glibc 2.33, which did not set it.
    if count > room // ENTRY.size or (order and order & _BYTE_ORDER_MASK != _LITTLE_ENDIAN):
        return None
    return base + HEADER.size, base, count, ENTRY.size


def _widen(old: bytes, count: int) -> bytes:
    """Return the table *old* of three words an entry in the new width."""
    table = bytearray(count * ENTRY.size)
    source, target = memoryview(old).cast("I"), memoryview(table).cast("I")
    for field in (_FLAGS, _NAME, _VALUE):
        target[field::_ENTRY_WORDS] = source[field::3]
    return bytes(table)


def _sections(data: bytes, base: int) -> dict[int, tuple[int, int]]:
    """Return {tag: (offset, bytes)} of the extension, empty where glibc would refuse it."""
    at = HEADER.unpack_from(data, base)[4]
    size = len(data)
    if at == 0 or at % 4 or at > size - _EXTENSION.size:
        return {}
    magic, count = _EXTENSION.unpack_from(data, at)
    at += _EXTENSION.size
    if magic != _EXTENSION_MAGIC or count > MAX_SECTIONS or count * _SECTION.size > size - at:
        return {}
    sections: dict[int, tuple[int, int]] = {}
    for tag, _, offset, length in _SECTION.iter_unpack(data[at : at + count * _SECTION.size]):
        if offset + length > size or (tag == _HWCAPS and length % 4):
            return {}
        # We write our section once: if there are two, an image forged one.
        sections[tag] = _NO_SECTION if tag == _OURS and tag in sections else (offset, length)
    return sections


def _hwcaps(data: bytes, end: int, sections: dict[int, tuple[int, int]]) -> tuple[int, ...]:
    """Return the positions of the hwcaps names after *end*, [] if one is elsewhere."""
    at, length = sections.get(_HWCAPS, _NO_SECTION)
    if length == 0 or length > 4 * MAX_HWCAPS_NAMES:
        return ()
    offsets = _struct.unpack_from(f"<{length // 4}I", data, at)
    if min(offsets) < end or max(offsets) >= len(data):
        return ()
    return tuple(offset - end for offset in offsets)


def _without(table: bytes, limit: int) -> bytes:
    """Return *table* without the entries whose value is at or above *limit*."""
    values = _column(table, _VALUE)
    cuts = list(compress(range(len(values)), map(limit.__le__, values)))
    ranges = zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(values)])
    return b"".join(table[a * ENTRY.size : b * ENTRY.size] for a, b in ranges)


def format_cache(table: bytes, strings: bytes, cache: Cache) -> bytes:
    """Return the file with *table* and *strings*, of which the image's part is from *cache*.

    Raises `LdcacheError` for one that `read_cache` would not take again.
    """
    lead = HEADER.size + len(table)
    sections = [(_OURS, _struct.pack("<I", lead + len(cache.tail)))]
    if cache.hwcaps:
        offsets = [lead + position for position in cache.hwcaps]
        sections.append((_HWCAPS, _struct.pack(f"<{len(offsets)}I", *offsets)))
    if cache.generator:
        sections.append((_GENERATOR, cache.generator))  # last: its length is not a multiple of 4
    extension = (lead + len(strings) + 3) & -4
    pieces = [
        HEADER.pack(_MAGIC, len(table) // ENTRY.size, len(strings), _LITTLE_ENDIAN, extension),
        table,
        strings,
        bytes(extension - lead - len(strings)),
        _EXTENSION.pack(_EXTENSION_MAGIC, len(sections)),
    ]
    at = extension + _EXTENSION.size + len(sections) * _SECTION.size
    for tag, content in sections:
        pieces.append(_SECTION.pack(tag, 0, at, len(content)))
        at += len(content)
    pieces.extend(content for _, content in sections)
    if at > MAX_CACHE_BYTES:
        # The next start of the container merges with the cache that this start wrote.
        raise LdcacheError(f"cannot make the ld.so.cache: {at} bytes, {MAX_CACHE_BYTES} at most")
    return b"".join(pieces)
