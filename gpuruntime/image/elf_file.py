# SPDX-License-Identifier: Apache-2.0
"""Read ELF files of images and of the driver: within limits, and without mapping them.

`gpuruntime.formats.elf` reads the headers, which is cheap: an image has thousands of programs.
pyelftools reads what is needed of a few files only, such as symbol versions. A malformed file
raises ElfError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection
from elftools.elf.segments import InterpSegment

from gpuruntime.discover.driver_table import LIBRARIES, NEVER
from gpuruntime.formats import elf
from gpuruntime.formats.cuda_note import CudaNote, NoteError, read_note
from gpuruntime.formats.elf import ElfError
from gpuruntime.image.contents import Binary, Versions, stem

Reader = Callable[[int, int], bytes]
_Read = TypeVar("_Read")

MAX_RODATA_BYTES = 128 << 20
MAX_OPENED = 64
MAX_SECTIONS = 1024
MAX_SEGMENTS = 256
MAX_TAGS = 4096
# Of one file, by pyelftools.
MAX_READS = 50_000
MAX_READ_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20
# The length of the longest name that the end of a chunk can cut.
_OVERLAP_BYTES = 256
_PROGBITS = 1
_WEAK = 2
_TYPE_AT = 16
_ORDER_AT = 5
_PROGRAM_OR_LIBRARY = (b"\x02\x00", b"\x03\x00", b"\x00\x02", b"\x00\x03")
_MAX_OFFSET = (1 << 63) - 1

# Libraries of an image whose symbol versions the driver's libraries require.
PROVIDERS = frozenset(
    {
        *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"),
        *("libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
        *("ld-linux.so.2", "ld-linux-armhf.so.3"),
    }
)
_IN_NAMES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.+-")
_INSIDE = ord("x")
_STEMS = sorted(
    (name for name, row in LIBRARIES.items() if row.capability != NEVER and name[:3] == "lib"),
    key=len,
    reverse=True,
)
# A whole file name, not a part of a format string. The character before it is checked separately:
# a pattern that begins with its literal is 40 times as fast.
_OPENED = re.compile(
    rb"lib(?:%s)\.so(?:\.[0-9]{1,9}){0,3}(?=[\0\s:'\",;)])"
    % b"|".join(re.escape(name[3:].encode()) for name in _STEMS)
)


def is_elf(head: bytes) -> bool:
    """Return whether a file that begins with *head* may be an ELF program or library."""
    return head[:4] == b"\x7fELF" and head[_TYPE_AT : _TYPE_AT + 2] in _PROGRAM_OR_LIBRARY


def is_big_endian(head: bytes) -> bool:
    """Return whether *head* is of a big-endian program: no driver exists for such machines."""
    return head[_ORDER_AT : _ORDER_AT + 1] == b"\x02"


def is_drivers(name: str) -> bool:
    """Return whether *name* is the name of a library that only the driver brings."""
    row = LIBRARIES.get(stem(name))
    return row is not None and row.capability != NEVER


def is_wanted(name: str) -> bool:
    """Return whether a program that needs *name* needs the driver or CUDA's runtime."""
    return is_drivers(name) or name.startswith(("libnvidia-", "libcudart.so"))


def read_binary(path: str, read_at: Reader, scan: Callable[[int], None]) -> Binary:
    """Return the facts of the ELF file *path* of an image; raise ElfError.

    *read_at* takes an offset and a length, and returns at most that many bytes. *scan* is called
    with each number of bytes before they are searched for names, and may raise to end the search.
    """
    first = elf.read(read_at)
    soname = first.soname or ""
    opens = _opened(read_at, scan)
    name = path.rpartition("/")[2]
    is_related = opens or any(map(is_wanted, (name, soname, *first.needed)))
    if not (is_related or soname in PROVIDERS):
        return Binary(path, first.abi, soname, first.needed)
    try:
        file = _open(read_at)
        interpreter, search = _guarded(lambda: _linkage(file))
    except ElfError:
        # The parts that the loader reads have been read.
        return Binary(path, first.abi, soname, first.needed, opens)
    return Binary(
        path=path,
        abi=first.abi,
        soname=soname,
        needed=first.needed,
        opens=opens,
        interpreter=interpreter,
        search=search,
        versions=_versions_if_any(file),
        note=_note(read_at) if stem(name) == "libcuda" else None,
    )


def read_versions(read_at: Reader) -> Versions:
    """Return the symbol versions of a library; raise ElfError."""
    file = _open(read_at)
    return _guarded(lambda: _versions(file))


class _File:
    """A file object for pyelftools over a read function, with a limit on reads and bytes."""

    def __init__(self, read_at: Reader) -> None:
        self._read_at = read_at
        self._at = 0
        self._reads = MAX_READS
        self._bytes = MAX_READ_BYTES

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            # pyelftools compares offsets with the length, and uses it for nothing else.
            offset += _MAX_OFFSET
        elif whence == os.SEEK_CUR:
            offset += self._at
        if not 0 <= offset <= _MAX_OFFSET:
            raise ElfError(f"offset {offset:#x} is beyond the end of any file")
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def read(self, length: int = -1) -> bytes:
        self._reads -= 1
        self._bytes -= max(length, 0)
        if length < 0 or self._reads < 0 or self._bytes < 0:
            raise ElfError(f"more than {MAX_READS} reads or {MAX_READ_BYTES} bytes of tables")
        data = self._read_at(self._at, length) if length else b""
        self._at += len(data)
        return data


def _guarded(read: Callable[[], _Read]) -> _Read:
    """Return the result of *read*; turn exceptions of pyelftools into ElfError."""
    try:
        return read()
    except (ElfError, OSError):
        raise
    except Exception as error:
        # Malformed bytes make its parsers raise exceptions of any kind.
        raise ElfError(f"{type(error).__name__}: {error}") from error


def _open(read_at: Reader) -> ELFFile:
    source: Any = _File(read_at)
    file = _guarded(lambda: ELFFile(source))
    if _guarded(file.num_segments) > MAX_SEGMENTS:
        raise ElfError(f"more than {MAX_SEGMENTS} program headers")
    if _guarded(file.num_sections) > MAX_SECTIONS:
        raise ElfError(f"more than {MAX_SECTIONS} section headers")
    return file


def _linkage(file: ELFFile) -> tuple[str, tuple[str, ...]]:
    """Return the interpreter, and the directories of DT_RUNPATH, by default of DT_RPATH."""
    interpreter = ""
    paths: dict[str, str] = {}
    for segment in file.iter_segments():
        if isinstance(segment, InterpSegment):
            interpreter = segment.get_interp_name()
        elif isinstance(segment, DynamicSegment):
            tag: Any
            for number, tag in enumerate(segment.iter_tags()):
                if tag.entry.d_tag == "DT_RPATH":
                    paths["rpath"] = tag.rpath
                elif tag.entry.d_tag == "DT_RUNPATH":
                    paths["runpath"] = tag.runpath
                if number > MAX_TAGS:
                    raise ElfError(f"more than {MAX_TAGS} entries of the dynamic section")
    search = paths.get("runpath") or paths.get("rpath") or ""
    return interpreter, tuple(part for part in search.split(":") if part)


def _versions_if_any(file: ELFFile) -> Versions:
    try:
        return _guarded(lambda: _versions(file))
    except ElfError:
        # They are found by section headers, which the loader does not need.
        return Versions()


def _versions(file: ELFFile) -> Versions:
    provides: set[str] = set()
    requires: dict[tuple[str, str], None] = {}
    for section in file.iter_sections():
        if isinstance(section, GNUVerDefSection):
            for _, names in section.iter_versions():
                provides |= {auxiliary.name for auxiliary in names}
        elif isinstance(section, GNUVerNeedSection):
            library: Any
            for library, auxiliaries in section.iter_versions():
                for auxiliary in auxiliaries:
                    # The loader only warns about a missing weak version.
                    if not auxiliary["vna_flags"] & _WEAK:
                        requires[library.name, auxiliary.name] = None
    return Versions(frozenset(provides), tuple(requires))


def _opened(read_at: Reader, scan: Callable[[int], None]) -> tuple[str, ...]:
    """Return the names of driver libraries in .rodata."""
    try:
        place = elf.find_section(read_at, b".rodata", _PROGBITS)
    except ElfError:
        # Section headers are optional: the loader does not need them.
        return ()
    if place is None:
        return ()
    at, length = place
    end = min(at + min(length, MAX_RODATA_BYTES), _MAX_OFFSET)
    opened: dict[str, None] = {}
    tail = b""
    while at < end and len(opened) < MAX_OPENED:
        size = min(_CHUNK_BYTES, end - at)
        scan(size)
        chunk = read_at(at, size)
        if not chunk:
            break
        at += len(chunk)
        data = tail + chunk
        # A name at the end of the section may have no NUL.
        for match in _OPENED.finditer(data if at < end else data + b"\0"):
            # A name at the start of the overlap was seen in the chunk before it.
            is_cut = len(tail) == _OVERLAP_BYTES
            before = data[match.start() - 1] if match.start() else _INSIDE if is_cut else 0
            if before not in _IN_NAMES:
                opened[match[0].decode()] = None
        tail = data[-_OVERLAP_BYTES:]
    return tuple(opened)


def _note(read_at: Reader) -> CudaNote | None:
    try:
        return read_note(read_at)
    except NoteError:
        # The hook does not use such a library.
        return None
