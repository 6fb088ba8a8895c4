# SPDX-License-Identifier: Apache-2.0
"""Whether an image's newer CUDA driver library can be used with the host's driver; pure.

On the start path. An ELF note in the library lists the drivers that it runs on. The size of the
note is limited, because it comes from the image; `readelf -n FILE` shows the same.
"""

from __future__ import annotations

import re
import struct

from cdi import strictjson
from gpuruntime.formats import elf
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Optional

    Version = Optional[tuple[int, ...]]

SECTION = b".note.cuda.fwd_compatibility"
OWNER = b"NVIDIA Corporation"
_NOTE_SECTION = 7
_NOTE = struct.Struct("<III")  # bytes of the owner, bytes of the description, type
_VERSION = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}){0,3}\Z")


class NoteError(ValueError):
    """The file has no readable note."""


class CudaNote(Record):
    """The note of a library: its CUDA version, and the major *drivers* that it runs on."""

    __slots__ = ("cuda_version", "drivers")

    def __init__(self, cuda_version: str, drivers: tuple[int, ...]) -> None:
        self.cuda_version = cuda_version
        self.drivers = drivers


def is_usable(
    compat_version: str, note: CudaNote | None, host_driver_version: str, host_cuda_version: str
) -> bool:
    """Return whether the library of *compat_version* works on the host; "" is unknown."""
    compat, driver = parse_version(compat_version), parse_version(host_driver_version)
    if note is None:
        # A library older than these notes needs only a host driver that is older than itself.
        is_comparable = compat is not None and driver is not None and not host_cuda_version
        return is_comparable and driver[0] < compat[0]  # type: ignore[index]  # both are known
    if compat is not None and driver is not None:
        return driver[0] in note.drivers and _is_newer(compat, driver)
    compat_cuda, cuda = parse_version(note.cuda_version), parse_version(host_cuda_version)
    return compat_cuda is not None and cuda is not None and _is_newer(compat_cuda, cuda)


def parse_version(text: str) -> Version:
    """Return the numbers of *text*, with or without leading zeros; None if it is no version."""
    if not _VERSION.match(text):
        return None
    return tuple(int(part) for part in text.split("."))


def _is_newer(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    length = max(len(first), len(second))
    return first + (0,) * (length - len(first)) > second + (0,) * (length - len(second))


def read_note(read_at: Callable[[int, int], bytes]) -> CudaNote | None:
    """Return the note of the library that *read_at* (offset, length) reads; None without one.

    Raises NoteError for a file that is damaged, no little-endian ELF, or beyond the limits.
    """
    try:
        section = elf.read_section(read_at, SECTION, _NOTE_SECTION)
    except elf.ElfError as error:
        raise NoteError(str(error)) from error
    return None if section is None else _parse_notes(section)


def _parse_notes(data: bytes) -> CudaNote:
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


def _parse_text(text: bytes) -> CudaNote:
    try:
        document = strictjson.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoteError(f"a note that is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise NoteError("a note that is not a JSON object")
    cuda, drivers = document.get("CUDA Version", ""), document.get("Driver") or []
    if not isinstance(cuda, str) or not isinstance(drivers, list):
        raise NoteError("a note with members of the wrong types")
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in drivers):
        raise NoteError("a note with drivers that are no numbers")
    return CudaNote(cuda, tuple(drivers))
