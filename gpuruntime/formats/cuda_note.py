# SPDX-License-Identifier: Apache-2.0
"""Whether an image's newer CUDA driver library may be used with the driver of the host; pure.

On the start path. The library says in an ELF note which drivers it can run on. It is read within
limits, for it comes from the image; `readelf -n FILE` shows the same.
"""

from __future__ import annotations

import re
import struct

from cdi import strictjson
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Optional

    Version = Optional[tuple[int, ...]]

SECTION = b".note.cuda.fwd_compatibility"
OWNER = b"NVIDIA Corporation"
# The ELF header has 64 bytes. Together: less than 64 KiB are read of any file.
MAX_SECTIONS_BYTES = 16 << 10
MAX_NAMES_BYTES = 16 << 10
MAX_NOTE_BYTES = 16 << 10

_IDENT = struct.Struct("<4sBBB9x")  # magic, class, byte order, version
_LITTLE_ENDIAN = 1
# Of the header: offset of the section headers, their size, their number, which one has the names.
# Of a section: name, type, offset, size.
_LAYOUTS = {
    1: (struct.Struct("<32xI10xHHH"), struct.Struct("<II8xII16x")),
    2: (struct.Struct("<40xQ10xHHH"), struct.Struct("<II16xQQ24x")),
}
_NOTE_SECTION = 7
_NOTE = struct.Struct("<III")  # bytes of the owner, bytes of the description, type
_MAX_OFFSET = (1 << 63) - 1 - (64 << 10)  # an off_t
_VERSION = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,3}\Z")


class NoteError(ValueError):
    """The file has no note that can be read."""


class Note(Record):
    """What a library says of itself: its CUDA version, and the major *drivers* that it runs on."""

    __slots__ = ("cuda_version", "drivers")

    def __init__(self, cuda_version: str, drivers: tuple[int, ...]) -> None:
        self.cuda_version = cuda_version
        self.drivers = drivers


def is_usable(
    compat_version: str, note: Note | None, host_driver_version: str, host_cuda_version: str
) -> bool:
    """Tell whether the library of *compat_version* is to be used on the host; "" is not known."""
    compat, driver = parse_version(compat_version), parse_version(host_driver_version)
    if note is None:
        # From before there were notes: such a library needs nothing but an older driver.
        known = compat is not None and driver is not None and not host_cuda_version
        return known and driver[0] < compat[0]  # type: ignore[index]  # both are known
    if compat is not None and driver is not None:
        return driver[0] in note.drivers and _is_newer(compat, driver)
    ours, cuda = parse_version(note.cuda_version), parse_version(host_cuda_version)
    return ours is not None and cuda is not None and _is_newer(ours, cuda)


def parse_version(text: str) -> Version:
    """Return the numbers of *text*, with or without leading zeros; None if it is no version."""
    if not _VERSION.match(text):
        return None
    return tuple(int(part) for part in text.split("."))


def _is_newer(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    length = max(len(one), len(other))
    return one + (0,) * (length - len(one)) > other + (0,) * (length - len(other))


def read_note(read_at: Callable[[int, int], bytes]) -> Note | None:
    """Return the note of the library that *read_at* (offset, length) reads; None without one.

    Raises NoteError for a file that is damaged, no little-endian ELF, or beyond the limits.
    """
    ident = _read(read_at, 0, _IDENT.size)
    magic, width, order, _ = _IDENT.unpack(ident)
    if magic != b"\x7fELF" or order != _LITTLE_ENDIAN or width not in _LAYOUTS:
        raise NoteError("no little-endian ELF")
    header, section = _LAYOUTS[width]
    table, size, count, names_index = header.unpack(_read(read_at, 0, header.size))
    if count == 0:
        return None
    if size != section.size or count * size > MAX_SECTIONS_BYTES or names_index >= count:
        raise NoteError(f"{count} section headers of {size} bytes, names in {names_index}")
    sections = list(section.iter_unpack(_read(read_at, table, count * size)))
    _, _, offset, length = sections[names_index]
    if length > MAX_NAMES_BYTES:
        raise NoteError(f"section names of {length} bytes")
    names = _read(read_at, offset, length)
    for name, kind, offset, length in sections:
        if kind != _NOTE_SECTION or names[name : name + len(SECTION) + 1] != SECTION + b"\0":
            continue
        if length > MAX_NOTE_BYTES:
            raise NoteError(f"a note of {length} bytes")
        return _parse_notes(_read(read_at, offset, length))
    return None


def _read(read_at: Callable[[int, int], bytes], offset: int, length: int) -> bytes:
    if offset > _MAX_OFFSET:
        raise NoteError(f"offset {offset:#x} is beyond the end of any file")
    data = read_at(offset, length)
    if len(data) != length:
        raise NoteError(f"{length} bytes at offset {offset:#x}: the file ends before")
    return data


def _parse_notes(data: bytes) -> Note:
    """Return the first of the notes in a section that is NVIDIA's."""
    at = 0
    while at + _NOTE.size <= len(data):
        owner_bytes, text_bytes, _ = _NOTE.unpack_from(data, at)
        at += _NOTE.size
        start = at + (owner_bytes + 3 & -4)
        if start + text_bytes > len(data):
            raise NoteError("a note that is longer than its section")
        if data[at : at + owner_bytes].rstrip(b"\0") == OWNER:
            return _parse_text(data[start : start + text_bytes].rstrip(b"\0"))
        at = start + (text_bytes + 3 & -4)
    raise NoteError("a section of notes without one of NVIDIA")


def _parse_text(text: bytes) -> Note:
    try:
        document = strictjson.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoteError(f"a note that is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise NoteError("a note that is no JSON object")
    cuda, drivers = document.get("CUDA Version", ""), document.get("Driver") or []
    if not isinstance(cuda, str) or not isinstance(drivers, list):
        raise NoteError("a note with members of the wrong types")
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in drivers):
        raise NoteError("a note with drivers that are no numbers")
    return Note(cuda, tuple(drivers))
