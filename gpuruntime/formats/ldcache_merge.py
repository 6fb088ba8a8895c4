# SPDX-License-Identifier: Apache-2.0
"""Merge library entries into a loader cache (/etc/ld.so.cache) without running ldconfig.

On the start path; pure: bytes in, bytes out. `ldconfig -p -C FILE` prints what it writes.
"""

from __future__ import annotations

from gpuruntime.errors import LdcacheError
from gpuruntime.formats.ldcache import (
    ENTRY,
    HEADER,
    MAX_NAME_BYTES,
    Cache,
    Names,
    Rows,
    format_cache,
    read_cache,
    shift,
    sort_key,
    values,
)
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# What the loader of an ABI accepts in an entry's flags: the low byte is "ELF, libc 6" (or, for
# i386's 3 alone, all of it), the next one the ABI.
ABI_FLAGS = {
    "x86-64": 0x303,
    "i386": 0x003,
    "x32": 0x803,
    "aarch64": 0xA03,
    "arm-hard-float": 0x903,
    "arm-soft-float": 0xB03,
    "ppc64le": 0x503,
    "riscv64": 0x1003,
}


# A part of the path of each library that only the driver installs.
_DRIVER_WORDS = (b"nvidia", b"libcuda", b"libnv")


class CacheEntry(Record):
    """A library that the loader must find: *soname* at *path*, for the ABI of *flags*."""

    __slots__ = ("flags", "path", "soname")

    def __init__(self, soname: str, path: str, flags: int) -> None:
        self.soname = soname
        self.path = path
        self.flags = flags


def merge(
    image: bytes | None, entries: Iterable[CacheEntry], *, keep_first: Iterable[str] = ()
) -> bytes:
    """Return the cache *image* with *entries* in front of all others of the same name.

    Entries of an earlier merge are taken out first: the same input gives the same bytes, and no
    entries give the image's own table back. A cache that a loader would ignore counts as empty.
    The image's entries in the directories *keep_first* stay in front of ours. Raises
    `LdcacheError` for an entry that no cache can hold and for an image beyond the limits.
    """
    cache = (read_cache(image) if image else None) or Cache()
    ours, strings = _place_strings(entries, cache.tail)
    names = _Search(strings, len(cache.tail), keep_first)
    for own in ours:
        names.checked(own.key)
    table = names.insert(ours, cache)
    if names.first_miss(ours, table) is not None:
        # The image's table is not sorted: a loader finds some of its names by chance.
        cache = _sort(cache, names)
        table = names.insert(ours, cache)
        missed = names.first_miss(ours, table)
        if missed is not None:
            # Numbers 2^31 apart: the order of three names may be cyclic.
            message = f'cannot place "{missed.soname}" in the ld.so.cache: its names have no order'
            raise LdcacheError(message)
    return format_cache(table, strings, cache)


def parse(
    data: bytes, is_wanted: Callable[[str], bool] | None = None
) -> list[tuple[str, str, int, int, int]]:
    """Return (name, value, flags, osversion, hwcap) of each entry of the cache *data*.

    In the file's order, ours included, like `ldconfig -p -C FILE`; with *is_wanted*, only entries
    with a name for which it returns true. Raises `LdcacheError` for a file that a loader would
    ignore and for one beyond the limits.
    """
    cache = read_cache(data, keep_ours=True)
    if cache is None:
        message = "cannot read the ld.so.cache: not a file that the loader would accept"
        raise LdcacheError(message, hint="run ldconfig in the root that holds the file")
    names = Names(cache.tail)
    return [
        (names.text(name - cache.lead), names.text(value - cache.lead), flags, osversion, hwcap)
        for flags, name, value, osversion, hwcap in ENTRY.iter_unpack(cache.table)
        if is_wanted is None or is_wanted(names.text(name - cache.lead))
    ]


def listed_directories(image: bytes | None, directories: Iterable[str]) -> set[str]:
    """Return those of *directories* in which *image* itself, our entries apart, has a library.

    Paths are compared as text: a caller that knows of links asks for each spelling. Raises
    `LdcacheError` for an image beyond the limits.
    """
    cache = read_cache(image) if image else None
    if cache is None:
        return set()
    starts = values(cache)
    return {name for name in directories if _has_library_in(cache, starts, name)}


def driver_paths(image: bytes | None) -> list[str]:
    """Return the paths of driver libraries in *image*: of an earlier merge, or of an ldconfig.

    Raises `LdcacheError` for an image beyond the limits, and for one that no loader accepts.
    """
    # Few images have one, most of them the file system of a restarted container.
    if not image or not any(word in image for word in _DRIVER_WORDS):
        return []
    words = [word.decode() for word in _DRIVER_WORDS]
    paths = [row[1] for row in parse(image)]
    return list(dict.fromkeys(path for path in paths if any(word in path for word in words)))


def _has_library_in(cache: Cache, starts: set[int], directory: str) -> bool:
    """Return whether a value of *cache*, which begin at *starts*, is directly in *directory*."""
    prefix = _encode(directory).rstrip(b"/") + b"/"
    at = cache.tail.find(prefix)
    while at >= 0:
        file = at + len(prefix)
        end = cache.tail.find(b"\0", file, file + MAX_NAME_BYTES)
        if at in starts and end > file and cache.tail.find(b"/", file, end) < 0:
            return True
        at = cache.tail.find(prefix, at + 1)
    return False


class _Ours:
    """One of our entries, with the positions of its strings in the merged string area."""

    __slots__ = ("flags", "key", "name", "soname", "value")

    def __init__(self, entry: CacheEntry, name: int, value: int) -> None:
        self.soname = entry.soname
        self.flags = entry.flags
        self.key = sort_key(_encode(entry.soname))
        self.name = name
        self.value = value


class _Search(Names):
    """The merged string area, and the order of entries of one name."""

    __slots__ = ("_keep_first", "_own_start")

    def __init__(self, strings: bytes, own_start: int, keep_first: Iterable[str]) -> None:
        super().__init__(strings)
        self._own_start = own_start
        self._keep_first = frozenset(d.rstrip("/") for d in keep_first)

    def insert(self, ours: list[_Ours], cache: Cache) -> bytes:
        """Return the table of *cache* with *ours*, highest first, at their places."""
        rows = cache.rows()
        key, name = self.key, rows.name
        lead = HEADER.size + len(cache.table) + ENTRY.size * len(ours)
        table = shift(cache.table, lead - cache.lead)
        pieces = []
        done = 0
        for own in ours:
            low, high = 0, len(rows)
            while low < high:
                middle = (low + high) // 2
                if self.compare(key(name(middle)), own.key) > 0:
                    low = middle + 1
                else:
                    high = middle
            at = max(self._after_kept(own, low, rows), done)
            pieces.append(table[done * ENTRY.size : at * ENTRY.size])
            pieces.append(ENTRY.pack(own.flags, own.name + lead, own.value + lead, 0, 0))
            done = at
        pieces.append(table[done * ENTRY.size :])
        return b"".join(pieces)

    def first_miss(self, ours: list[_Ours], table: bytes) -> _Ours | None:
        """Look *ours* up in *table* as a loader does; return the first entry that is not found."""
        rows = Rows(table, HEADER.size + len(table))
        for own in ours:
            at = self._find(own.key, rows)
            while at < len(rows) and self.key(rows.name(at)) == own.key:
                if rows.flags(at) == own.flags and not self._is_kept_first(rows.value(at)):
                    break
                at += 1
            else:
                return own
            if rows.value(at) < self._own_start:
                return own
        return None

    def _after_kept(self, own: _Ours, at: int, rows: Rows) -> int:
        """Return the index after the last entry of *own*'s name that must precede it."""
        place = at
        while self._keep_first and at < len(rows) and self.key(rows.name(at)) == own.key:
            at += 1
            if self._is_kept_first(rows.value(at - 1)):
                place = at
        return place

    def _is_kept_first(self, value: int) -> bool:
        if not self._keep_first or value >= self._own_start:
            return False
        return self.text(value).rpartition("/")[0] in self._keep_first

    def _find(self, key: tuple[int, ...], rows: Rows) -> int:
        """Return the index of a name's first entry by the loader's own steps, else len(rows)."""
        low, high = 0, len(rows) - 1
        while low <= high:
            middle = (low + high) // 2
            order = self.compare(key, self.key(rows.name(middle)))
            if order == 0:
                while middle and self.key(rows.name(middle - 1)) == key:
                    middle -= 1
                return middle
            if order < 0:
                low = middle + 1
            else:
                high = middle - 1
        return len(rows)


def _place_strings(entries: Iterable[CacheEntry], tail: bytes) -> tuple[list[_Ours], bytes]:
    """Return *entries*, highest first, and *tail* followed by their strings."""
    strings = bytearray(tail)
    places: dict[bytes, int] = {}
    ours = []
    for entry in entries:
        soname, path = _encode(entry.soname), _encode(entry.path)
        if not (_is_storable(soname) and _is_storable(path) and path.startswith(b"/")):
            message = f'cannot cache "{entry.soname}" at "{entry.path}": not a name and a path'
            raise LdcacheError(message)
        for text in (path,) if path.endswith(soname) else (path, soname):
            if text not in places:
                places[text] = len(strings)
                strings += text + b"\0"
        value = places[path]
        name = value + len(path) - len(soname) if path.endswith(soname) else places[soname]
        ours.append(_Ours(entry, name, value))
    # ldconfig's order. Equal entries keep their order, because the reverse sort is stable too.
    ours.sort(key=lambda own: (own.key, own.flags), reverse=True)
    return ours, bytes(strings)


def _sort(cache: Cache, names: Names) -> Cache:
    rows = cache.rows()
    order = sorted(range(len(rows)), key=lambda i: names.key(rows.name(i)), reverse=True)
    size = ENTRY.size
    table = b"".join(cache.table[i * size : (i + 1) * size] for i in order)
    return Cache(table, cache.lead, cache.tail, cache.hwcaps, cache.generator)


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise LdcacheError(f'cannot cache "{text}": not the text of any bytes') from None


def _is_storable(text: bytes) -> bool:
    return 0 < len(text) < MAX_NAME_BYTES and b"\0" not in text
