# SPDX-License-Identifier: Apache-2.0
"""ld.so.cache: read it, and merge entries into it without running anything; pure over bytes.

On the start path. The format is that of glibc 2.2 and later (`ldconfig -p` prints it). Written is
always the new format alone: every loader since glibc 2.29 takes it. What a loader would refuse
counts as empty, since the loader goes on without it too. Whatever came from the image stays as it
is, in its order; our entries carry a mark, so that the next merge takes them out first.
"""

from __future__ import annotations

import re
import struct

from gpuruntime.errors import LdcacheError
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAGIC = b"glibc-ld.so.cache1.1"
OLD_MAGIC = b"ld.so-1.7.0"
MAX_CACHE_BYTES = 64 << 20
MAX_STRING_BYTES = 4096
MAX_HWCAPS = 1024
MAX_SECTIONS = 32

# What the loader demands of an entry, by ABI: ldconfig's flags for an ELF library of glibc.
ABI_FLAGS = {
    "i386": 0x0003,
    "x86-64": 0x0303,
    "s390x": 0x0403,
    "ppc64le": 0x0503,
    "x32": 0x0803,
    "arm": 0x0903,
    "aarch64": 0x0A03,
    "riscv64": 0x1003,
}

_HEADER = struct.Struct("<20sIIB3xI12x")
_ENTRY = struct.Struct("<iIIIQ")
_OLD_ENTRY = struct.Struct("<iII")
_SECTION = struct.Struct("<IIII")
_EXTENSION_MAGIC = 0xEAA42174
_TAG_GENERATOR, _TAG_HWCAPS, _TAG_OURS = 0, 1, 0x47505521
_LITTLE_ENDIAN = 2
_DIGITS = re.compile(rb"[0-9]+")


class Entry(Record):
    """One library: the name a program asks for, the path as the container sees it, the flags."""

    __slots__ = ("flags", "path", "soname")

    def __init__(self, soname: str, path: str, flags: int) -> None:
        self.soname = soname
        self.path = path
        self.flags = flags


class Image:
    """The part of a cache that came from the image: table, strings, hwcaps, generator.

    Offsets in the table are relative to `base`, as the bytes `strings` begin there.
    """

    def __init__(self) -> None:
        self.table = b""
        self.strings = b""
        self.base = 0
        self.hwcaps: tuple[int, ...] = ()
        self.generator = b""

    @property
    def count(self) -> int:
        """The number of entries."""
        return len(self.table) // _ENTRY.size

    def text(self, offset: int) -> bytes:
        """Return the string at *offset*, at most MAX_STRING_BYTES of it."""
        start = offset - self.base
        end = self.strings.find(b"\0", start, start + MAX_STRING_BYTES)
        return self.strings[start : end if end >= 0 else start + MAX_STRING_BYTES]

    def has_value_in(self, directory: str) -> bool:
        """Tell whether a library lies directly in *directory*: the image's ldconfig scans it."""
        pattern = re.escape(directory.encode("utf-8", "surrogateescape").rstrip(b"/"))
        return re.search(rb"(?:\A|\0)" + pattern + rb"/[^/\0]+\0", self.strings) is not None

    def entries(self) -> list[Entry]:
        """Return all entries, decoded."""
        found = []
        for flags, key, value, _, _ in _ENTRY.iter_unpack(self.table):
            soname, path = (self.text(o).decode("utf-8", "surrogateescape") for o in (key, value))
            found.append(Entry(soname, path, flags))
        return found


def read(data: bytes, *, with_ours: bool = False) -> Image:
    """Return what came from the image in the cache *data*; an empty one if a loader refuses it."""
    if len(data) > MAX_CACHE_BYTES:
        return Image()
    if data.startswith(MAGIC):
        return _read_new(data, 0, with_ours=with_ours)
    if data.startswith(OLD_MAGIC) and len(data) >= 16:
        (count,) = struct.unpack_from("<I", data, 12)
        end = 16 + _OLD_ENTRY.size * count
        # Old i386 writers aligned to four.
        for start in ((end + 7) & ~7, (end + 3) & ~3):
            if data.startswith(MAGIC, start):
                return _read_new(data, start, with_ours=with_ours)
        return _read_old(data, count, end)
    return Image()


def parse(data: bytes) -> list[Entry]:
    """Return every entry of the cache *data*, in its order, ours included."""
    return read(data, with_ours=True).entries()


def _read_new(data: bytes, start: int, *, with_ours: bool) -> Image:
    image = Image()
    size = len(data) - start
    if size <= _HEADER.size:
        return image
    _, count, _, flags, extension = _HEADER.unpack_from(data, start)
    if count > (size - _HEADER.size) // _ENTRY.size or flags & 3 not in (0, _LITTLE_ENDIAN):
        return image
    base = _HEADER.size + _ENTRY.size * count
    table = data[start + _HEADER.size : start + base]
    sections = _read_sections(data, extension)
    ours = sections.get(_TAG_OURS, b"")
    if len(ours) == 4 and not with_ours:
        (first,) = struct.unpack("<I", ours)
        if base <= first < size:
            table = _without_values_from(table, first)
    if not _offsets_fit(table, base, size):
        return image
    hwcaps: tuple[int, ...] = ()
    # Behind an old table the loader looks for the hwcaps names in the wrong place and never uses
    # them; a new-only cache must not switch them on.
    if start == 0:
        hwcaps = _read_hwcaps(sections.get(_TAG_HWCAPS, b""), base, size)
    image.table = table
    image.base = base
    image.strings = _used_strings(data[start + base :], base, table, hwcaps)
    image.hwcaps = hwcaps
    image.generator = sections.get(_TAG_GENERATOR, b"")[:MAX_STRING_BYTES]
    return image


def _read_old(data: bytes, count: int, end: int) -> Image:
    """Read a cache of the old format alone: offsets count from the end of its table."""
    image = Image()
    if count > (len(data) - 16) // _OLD_ENTRY.size:
        return image
    table = b"".join(
        _ENTRY.pack(flags, key, value, 0, 0)
        for flags, key, value in _OLD_ENTRY.iter_unpack(data[16:end])
    )
    if _offsets_fit(table, 0, len(data) - end):
        image.table = table
        image.strings = _used_strings(data[end:], 0, table, ())
    return image


def _columns(table: bytes) -> tuple[memoryview, memoryview]:
    words = memoryview(table).cast("I")
    return words[1::6], words[2::6]


def _offsets_fit(table: bytes, low: int, high: int) -> bool:
    if not table:
        return True
    keys, values = _columns(table)
    return min(*keys, *values) >= low and max(*keys, *values) < high


def _without_values_from(table: bytes, first: int) -> bytes:
    size = _ENTRY.size
    _, values = _columns(table)
    return b"".join(
        table[i * size : (i + 1) * size] for i, value in enumerate(values) if value < first
    )


def _used_strings(tail: bytes, base: int, table: bytes, hwcaps: tuple[int, ...]) -> bytes:
    """Return *tail* up to the end of the last string in use, ended by a NUL."""
    if not table:
        return b""
    keys, values = _columns(table)
    last = max(*keys, *values, *hwcaps) - base
    end = tail.find(b"\0", last)
    return tail[: end + 1] if end >= 0 else tail + b"\0"


def _read_sections(data: bytes, start: int) -> dict[int, bytes]:
    """Return tag → content of the extension directory; none of it if it is malformed."""
    if start == 0 or start % 4 or start + 8 > len(data):
        return {}
    magic, count = struct.unpack_from("<II", data, start)
    if magic != _EXTENSION_MAGIC or count > MAX_SECTIONS:
        return {}
    if start + 8 + _SECTION.size * count > len(data):
        return {}
    sections: dict[int, bytes] = {}
    for i in range(count):
        tag, _, offset, size = _SECTION.unpack_from(data, start + 8 + _SECTION.size * i)
        if offset + size > len(data):
            return {}
        sections.setdefault(tag, data[offset : offset + size])
    return sections


def _read_hwcaps(section: bytes, low: int, high: int) -> tuple[int, ...]:
    if len(section) % 4 or len(section) > 4 * MAX_HWCAPS:
        return ()
    offsets = struct.unpack(f"<{len(section) // 4}I", section)
    return offsets if all(low <= offset < high for offset in offsets) else ()


def sort_key(name: bytes) -> tuple[int, ...]:
    """Return the key of ldconfig's order: bytes are signed, a run of digits is one number.

    A number ranks above any other byte and above the end. The table runs from high to low.
    """
    key: list[int] = []
    at = 0
    for match in _DIGITS.finditer(name):
        key += [byte - 256 if byte > 127 else byte for byte in name[at : match.start()]]
        digits = match.group()
        # Longer than any number that matters; Python refuses to convert 4,300 digits.
        key += [256, int(digits[-1024:]) % 2**32]
        at = match.end()
    key += [byte - 256 if byte > 127 else byte for byte in name[at:]]
    key.append(0)
    return tuple(key)


def merge(data: bytes | None, entries: Sequence[Entry]) -> bytes:
    """Return the cache *data* (None: there is none) with *entries* in front of equal names.

    The same input gives the same bytes, and a merge of a merge gives what the last one alone
    would. Raises LdcacheError if an entry cannot be found in the result as a loader searches it.
    """
    image = read(data) if data is not None else Image()
    merged = _insert(image, entries, _places(image, entries))
    if not _finds(merged, entries):
        # A table that is out of order; ldconfig's own would not be searched rightly either.
        _sort(image)
        merged = _insert(image, entries, _places(image, entries))
        if not _finds(merged, entries):
            raise LdcacheError("the merged cache would not be searched rightly by the loader")
    return merged


def _encoded(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    if not data or b"\0" in data or len(data) >= MAX_STRING_BYTES:
        raise LdcacheError(f'"{text}" cannot be in a loader cache')
    return data


def _places(image: Image, entries: Iterable[Entry]) -> list[tuple[int, Entry]]:
    """Return (index of the image's entry to stand before, entry), in the order of the table."""
    keyed = [(sort_key(_encoded(entry.soname)), entry) for entry in entries]
    keyed.sort(key=lambda item: (item[0], item[1].flags), reverse=True)
    return [(_first_not_above(image, key), entry) for key, entry in keyed]


def _first_not_above(image: Image, key: tuple[int, ...]) -> int:
    """Return the index of the first entry whose name does not rank above *key*."""
    low, high = 0, image.count
    while low < high:
        middle = (low + high) // 2
        (offset,) = struct.unpack_from("<I", image.table, middle * _ENTRY.size + 4)
        if sort_key(image.text(offset)) > key:
            low = middle + 1
        else:
            high = middle
    return low


def _insert(image: Image, entries: Sequence[Entry], places: list[tuple[int, Entry]]) -> bytes:
    count = image.count + len(entries)
    base = _HEADER.size + _ENTRY.size * count
    shift = base - image.base
    table = _shifted(image.table, shift)
    strings = bytearray(image.strings)
    ours = base + len(strings)
    parts, done = [], 0
    for index, entry in places:
        path, soname = _encoded(entry.path), _encoded(entry.soname)
        value = base + len(strings)
        strings += path + b"\0"
        if path.endswith(b"/" + soname):
            key = value + len(path) - len(soname)
        else:
            key = base + len(strings)
            strings += soname + b"\0"
        parts.append(table[done : index * _ENTRY.size])
        parts.append(_ENTRY.pack(entry.flags, key, value, 0, 0))
        done = index * _ENTRY.size
    parts.append(table[done:])
    strings += bytes(-(base + len(strings)) % 4)
    extension = base + len(strings)
    if extension > MAX_CACHE_BYTES:
        raise LdcacheError("the merged cache would be too large")
    header = _HEADER.pack(MAGIC, count, len(strings), _LITTLE_ENDIAN, extension)
    hwcaps = struct.pack(f"<{len(image.hwcaps)}I", *(offset + shift for offset in image.hwcaps))
    sections = [(_TAG_OURS, struct.pack("<I", ours))]
    if hwcaps:
        sections.insert(0, (_TAG_HWCAPS, hwcaps))
    # Not a multiple of four, so it stands last.
    sections.append((_TAG_GENERATOR, image.generator or b"gpuruntime"))
    return b"".join([header, *parts, strings, _sections(sections, extension)])


def _shifted(table: bytes, shift: int) -> bytes:
    """Return *table* with *shift* added to every offset: one addition of one large number."""
    if not table or not shift:
        return table
    step = struct.pack("<IIIIQ", 0, abs(shift), abs(shift), 0, 0) * (len(table) // _ENTRY.size)
    number, addend = int.from_bytes(table, "little"), int.from_bytes(step, "little")
    # No carry: every offset was checked against the size of the file.
    number = number + addend if shift > 0 else number - addend
    return number.to_bytes(len(table), "little")


def _sections(sections: list[tuple[int, bytes]], start: int) -> bytes:
    offset = start + 8 + _SECTION.size * len(sections)
    directory = [struct.pack("<II", _EXTENSION_MAGIC, len(sections))]
    for tag, content in sections:
        directory.append(_SECTION.pack(tag, 0, offset, len(content)))
        offset += len(content)
    return b"".join([*directory, *(content for _, content in sections)])


def lookup(image: Image, soname: str, flags: int) -> str | None:
    """Return the path that a loader wanting *flags* finds for *soname*, plain entries only."""
    key = sort_key(_encoded(soname))
    index = _first_not_above(image, key)
    while index < image.count:
        found, name, value, _, _ = _ENTRY.unpack_from(image.table, index * _ENTRY.size)
        if sort_key(image.text(name)) != key:
            return None
        if found == flags:
            return image.text(value).decode("utf-8", "surrogateescape")
        index += 1
    return None


def _finds(merged: bytes, entries: Iterable[Entry]) -> bool:
    """Tell whether every one of *entries* is found in *merged*."""
    whole = _whole(merged)
    wanted: dict[tuple[tuple[int, ...], int], str] = {}
    for entry in entries:
        wanted.setdefault((sort_key(_encoded(entry.soname)), entry.flags), entry.path)
    return all(
        lookup(whole, entry.soname, entry.flags)
        == wanted[sort_key(_encoded(entry.soname)), entry.flags]
        for entry in entries
    )


def _whole(merged: bytes) -> Image:
    """Return a merged cache as a loader sees it: our entries are entries like all."""
    image = Image()
    _, count, length, _, _ = _HEADER.unpack_from(merged)
    image.base = _HEADER.size + _ENTRY.size * count
    image.table = merged[_HEADER.size : image.base]
    image.strings = merged[image.base : image.base + length]
    return image


def _sort(image: Image) -> None:
    """Bring the image's table into ldconfig's order, stably."""
    size = _ENTRY.size
    rows = [image.table[i : i + size] for i in range(0, len(image.table), size)]
    rows.sort(
        key=lambda row: sort_key(image.text(struct.unpack_from("<I", row, 4)[0])), reverse=True
    )
    image.table = b"".join(rows)
