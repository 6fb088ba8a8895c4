# SPDX-License-Identifier: Apache-2.0
"""Read ELF files: what the loader knows of a library, whether it needs a loader, one section.

On the start path; pure over bytes, an open file or a function that reads. Little-endian ELF, 32
and 64 bit. Each table and name is read within the limits below. `readelf -hlSd FILE` shows the
same. Whatever is malformed is an ElfError.
"""

from __future__ import annotations

import struct

from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    Reader = Callable[[int, int], bytes]

MAX_TABLE_BYTES = 64 << 10  # of program headers and of the dynamic section, each
MAX_SECTION_BYTES = 16 << 10  # of section headers, of their names, and of the section, each
MAX_NAME_BYTES = 4096
MAX_NEEDED = 512
_NAME_CHUNK_BYTES = 64
_MAX_FILE_OFFSET = (1 << 63) - 1 - MAX_TABLE_BYTES  # an off_t: seek raises OverflowError beyond

_IDENT = struct.Struct("<4sBBB9x")  # magic, class, byte order, version
_CLASS32, _CLASS64 = 1, 2
_LITTLE_ENDIAN = 1
_CURRENT_VERSION = 1
_EXECUTABLE, _LIBRARY = 2, 3

_LOAD = 1
_DYNAMIC = 2
_INTERPRETER = 3

_NULL = 0
_NEEDED = 1
_STRTAB = 5
_STRSZ = 10
_SONAME = 14

_I386, _ARM, _X86_64, _PPC64, _AARCH64, _RISCV = 3, 40, 62, 21, 183, 243
_ARM_HARD_FLOAT = 0x400
_RISCV_FLOAT_MASK, _RISCV_DOUBLE = 0x6, 0x4


class ElfError(ValueError):
    """The bytes are not a little-endian ELF program or library, or are damaged."""


class Elf(Record):
    """The loader's data of a library or program.

    *abi* is a name in `ldcache_merge.ABI_FLAGS`, or "" for any other machine. *interpreter* is the
    path of the loader that a program names, "" if it names none.
    """

    __slots__ = ("abi", "interpreter", "needed", "soname")

    def __init__(
        self, abi: str, soname: str | None, needed: tuple[str, ...], interpreter: str = ""
    ) -> None:
        self.abi = abi
        self.soname = soname
        self.needed = needed
        self.interpreter = interpreter


class _Layout:
    """The positions of the fields that differ between the two classes."""

    __slots__ = ("dynamic", "header", "section", "segment", "segment_fields")

    def __init__(
        self, header: str, segment: str, fields: tuple[int, ...], dynamic: str, section: str
    ) -> None:
        self.header = struct.Struct(header)
        self.segment = struct.Struct(segment)
        self.segment_fields = fields
        self.dynamic = struct.Struct(dynamic)
        self.section = struct.Struct(section)


# Header, after the identification: type, machine, version, entry, offset of program headers,
# offset of section headers, flags, header size, size and count of program headers, size and count
# of section headers, index of the section with their names.
# Segment fields: the places of offset, address and size in the file.
# Section: name, type, offset, size.
_LAYOUTS = {
    _CLASS32: _Layout("<HHIIIIIHHHHHH", "<8I", (1, 2, 4), "<II", "<II8xII16x"),
    _CLASS64: _Layout("<HHIQQQIHHHHHH", "<IIQQQQQQ", (2, 3, 5), "<QQ", "<II16xQQ24x"),
}


class _Header:
    """The header of the file that *read_at* reads; raises ElfError."""

    __slots__ = ("fields", "layout", "read_at", "width")

    def __init__(self, read_at: Reader) -> None:
        self.read_at = read_at
        ident = _read(read_at, 0, _IDENT.size)
        magic, self.width, order, version = _IDENT.unpack(ident)
        if magic != b"\x7fELF":
            raise ElfError("not an ELF file")
        layout = _LAYOUTS.get(self.width)
        if layout is None or order != _LITTLE_ENDIAN or version != _CURRENT_VERSION:
            raise ElfError(
                f"unknown ELF: class {self.width}, byte order {order}, version {version}"
            )
        self.layout = layout
        self.fields = layout.header.unpack(_read(read_at, _IDENT.size, layout.header.size))

    def segments(self) -> list[tuple[int, ...]]:
        """Return the program headers of a program or library."""
        kind, _, _, _, table, _, _, _, size, count, *_ = self.fields
        if kind not in (_EXECUTABLE, _LIBRARY):
            raise ElfError(f"ELF of type {kind} is neither a program nor a library")
        if count and (size != self.layout.segment.size or count * size > MAX_TABLE_BYTES):
            raise ElfError(f"{count} program headers of {size} bytes")
        return list(self.layout.segment.iter_unpack(_read(self.read_at, table, count * size)))

    def sections(self) -> tuple[list[tuple[int, ...]], bytes]:
        """Return the section headers, and the bytes of their names."""
        table, (size, count, names_index) = self.fields[5], self.fields[10:]
        if not count:
            return [], b""
        if (
            size != self.layout.section.size
            or count * size > MAX_SECTION_BYTES
            or names_index >= count
        ):
            raise ElfError(f"{count} section headers of {size} bytes, names in {names_index}")
        rows = list(self.layout.section.iter_unpack(_read(self.read_at, table, count * size)))
        _, _, offset, length = rows[names_index]
        if length > MAX_SECTION_BYTES:
            raise ElfError(f"section names of {length} bytes")
        return rows, _read(self.read_at, offset, length)


def read(source: bytes | BinaryIO | Reader) -> Elf:
    """Return the loader's data of the ELF file *source*.

    Only program headers are used, as the loader does: section headers may be stripped. A file is
    read by seek and read, and stays open; a function is called as by `read_section`. Raises
    `ElfError` for anything malformed; what the source's own read raises is passed on.
    """
    header = _Header(_reader(source))
    layout = header.layout
    loads = []
    dynamic = None
    interpreter = ""
    for segment in header.segments():
        offset, address, length = (segment[field] for field in layout.segment_fields)
        if segment[0] == _LOAD:
            loads.append((address, offset, length))
        elif segment[0] == _DYNAMIC:
            dynamic = offset, length
        elif segment[0] == _INTERPRETER:
            interpreter = _read_name(header.read_at, offset, length)
    abi = _abi(header.fields[1], header.width, header.fields[6])
    if dynamic is None:
        return Elf(abi, None, (), interpreter)
    soname, needed = _read_dynamic(header.read_at, layout, loads, *dynamic)
    return Elf(abi, soname, needed, interpreter)


def is_static_program(data: bytes) -> bool:
    """Return whether *data* is a static 64-bit program, which needs no loader."""
    try:
        header = _Header(_reader(data))
        kinds = [segment[0] for segment in header.segments()]
    except ElfError:
        return False
    return header.width == _CLASS64 and bool(kinds) and _INTERPRETER not in kinds


def read_section(read_at: Reader, name: bytes, kind: int) -> bytes | None:
    """Return the first section *name* of type *kind*, None without one; raise ElfError.

    *read_at* returns what there is of so many bytes at an offset.
    """
    place = find_section(read_at, name, kind)
    if place is None:
        return None
    offset, length = place
    if length > MAX_SECTION_BYTES:
        raise ElfError(f"a section of {length} bytes")
    return _read(read_at, offset, length)


def find_section(read_at: Reader, name: bytes, kind: int) -> tuple[int, int] | None:
    """Return offset and length of the bytes that `read_section` reads; raise ElfError."""
    rows, names = _Header(read_at).sections()
    for name_at, row_kind, offset, length in rows:
        if row_kind == kind and names[name_at : name_at + len(name) + 1] == name + b"\0":
            return offset, length
    return None


def _abi(machine: int, width: int, flags: int) -> str:
    if machine == _X86_64:
        return "x86-64" if width == _CLASS64 else "x32"
    if machine == _ARM:
        return "arm-hard-float" if flags & _ARM_HARD_FLOAT else "arm-soft-float"
    if machine == _RISCV:
        is_lp64d = width == _CLASS64 and flags & _RISCV_FLOAT_MASK == _RISCV_DOUBLE
        return "riscv64" if is_lp64d else ""
    abis = {
        (_I386, _CLASS32): "i386",
        (_AARCH64, _CLASS64): "aarch64",
        (_PPC64, _CLASS64): "ppc64le",
    }
    return abis.get((machine, width), "")


def _read_dynamic(
    read_at: Reader,
    layout: _Layout,
    loads: list[tuple[int, int, int]],
    offset: int,
    length: int,
) -> tuple[str | None, tuple[str, ...]]:
    """Return the SONAME and the needed names."""
    if length > MAX_TABLE_BYTES:
        raise ElfError(f"dynamic section of {length} bytes, {MAX_TABLE_BYTES} at most")
    length -= length % layout.dynamic.size
    soname = None
    needed = []
    names: dict[int, int] = {}
    for tag, value in layout.dynamic.iter_unpack(_read(read_at, offset, length)):
        if tag == _NULL:
            break
        if tag == _NEEDED:
            needed.append(value)
        elif tag == _SONAME:
            soname = value
        elif tag in (_STRTAB, _STRSZ):
            names[tag] = value
    if soname is None and not needed:
        return None, ()
    if len(needed) > MAX_NEEDED:
        raise ElfError(f"{len(needed)} needed libraries, {MAX_NEEDED} at most")
    if len(names) < 2:
        raise ElfError("dynamic section without a string table")
    start = _file_offset(loads, names[_STRTAB])

    def name(at: int) -> str:
        return _read_name(read_at, start + at, names[_STRSZ] - at)

    return None if soname is None else name(soname), tuple(name(at) for at in needed)


def _file_offset(loads: list[tuple[int, int, int]], address: int) -> int:
    for start, offset, length in loads:
        if start <= address < start + length:
            return address - start + offset
    raise ElfError(f"address {address:#x} is in no segment")


def _read_name(read_at: Reader, at: int, room: int) -> str:
    name = b""
    while len(name) < min(room, MAX_NAME_BYTES):
        chunk = _read(read_at, at + len(name), min(_NAME_CHUNK_BYTES, room - len(name)))
        end = chunk.find(b"\0")
        if end >= 0:
            return (name + chunk[:end]).decode("utf-8", "surrogateescape")
        name += chunk
    raise ElfError("a name that does not end")


def _reader(source: bytes | BinaryIO | Reader) -> Reader:
    """Return a function of offset and length that reads the available bytes of *source*."""
    if isinstance(source, bytes):
        data = source
        return lambda offset, length: data[offset : offset + length]
    if callable(source):
        return source
    file = source

    def read_at(offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)

    return read_at


def _read(read_at: Reader, offset: int, length: int) -> bytes:
    """Return exactly *length* bytes at *offset*; raise ElfError."""
    if not length:
        # Regardless of the offset, which the file system may not support.
        return b""
    if offset > _MAX_FILE_OFFSET:
        raise ElfError(f"offset {offset:#x} is beyond the end of any file")
    data = read_at(offset, length)
    if len(data) != length:
        raise ElfError(f"{length} bytes at offset {offset:#x}: the file ends before")
    return data
