# SPDX-License-Identifier: Apache-2.0
"""ELF by struct: the ABI of a file, its SONAME and what it needs; bounded reads, pure over bytes.

On the start path. ELF-64 Object File Format; `readelf -hd` shows the same. Section headers are not
used: a stripped library has none, and the loader looks at none either.
"""

from __future__ import annotations

import struct

from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TABLE_BYTES = 64 << 10
MAX_NAME_BYTES = 4096
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME = 1, 5, 14

# (class, machine) → the name of the ABI. Class 1 is 32 bit, 2 is 64 bit.
_ABIS = {
    (2, 62): "x86-64",
    (1, 62): "x32",
    (1, 3): "i386",
    (2, 183): "aarch64",
    (1, 40): "arm",
    (2, 21): "ppc64le",
    (2, 22): "s390x",
    (2, 243): "riscv64",
}


class ElfError(ValueError):
    """The bytes are no ELF file that can be read."""


class Elf(Record):
    """What a shared object says of itself; `soname` is "" if it has none."""

    __slots__ = ("abi", "needed", "soname")

    def __init__(self, *, abi: str, soname: str, needed: tuple[str, ...]) -> None:
        self.abi = abi
        self.soname = soname
        self.needed = needed


def read(pread: Callable[[int, int], bytes]) -> Elf:
    """Read a shared object through *pread(length, offset)*; raise ElfError if it is none.

    Little-endian only, as every host of this driver is. At most a few tables of 64 KiB are read.
    """
    try:
        return _read(pread)
    except (struct.error, IndexError, OverflowError) as error:
        raise ElfError(f"truncated or malformed: {error}") from error


def _read(pread: Callable[[int, int], bytes]) -> Elf:
    head = pread(64, 0)
    if head[:4] != b"\x7fELF" or head[5] != 1:
        raise ElfError("no little-endian ELF file")
    wide = head[4] == 2
    (machine,) = struct.unpack_from("<H", head, 18)
    abi = _ABIS.get((head[4], machine))
    if abi is None:
        raise ElfError(f"ELF class {head[4]} of machine {machine} is not known")
    offset, size, count = (
        (*struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54))
        if wide
        else (*struct.unpack_from("<I", head, 28), *struct.unpack_from("<HH", head, 42))
    )
    if size < (56 if wide else 32) or size * count > MAX_TABLE_BYTES:
        raise ElfError("program headers of a wrong size")
    table = pread(size * count, offset)
    loads = []
    dynamic = None
    for start in range(0, size * count, size):
        if wide:
            kind, _, at, address, _, length = struct.unpack_from("<IIQQQQ", table, start)
        else:
            kind, at, address, _, length = struct.unpack_from("<IIIII", table, start)
        if kind == _PT_LOAD:
            loads.append((address, length, at))
        elif kind == _PT_DYNAMIC:
            dynamic = (at, min(length, MAX_TABLE_BYTES))
    if dynamic is None:
        return Elf(abi=abi, soname="", needed=())
    return _read_dynamic(pread, wide=wide, abi=abi, loads=loads, table=dynamic)


def _read_dynamic(
    pread: Callable[[int, int], bytes],
    *,
    wide: bool,
    abi: str,
    loads: list[tuple[int, int, int]],
    table: tuple[int, int],
) -> Elf:
    data = pread(table[1], table[0])
    entry = struct.Struct("<qQ" if wide else "<iI")
    needed, soname, strings = [], None, None
    for start in range(0, len(data) - entry.size + 1, entry.size):
        tag, value = entry.unpack_from(data, start)
        if tag == 0:
            break
        if tag == _DT_NEEDED:
            needed.append(value)
        elif tag == _DT_SONAME:
            soname = value
        elif tag == _DT_STRTAB:
            strings = value
    if strings is None:
        return Elf(abi=abi, soname="", needed=())
    at = next((a + strings - v for v, n, a in loads if v <= strings < v + n), None)
    if at is None:
        raise ElfError("the string table is in no segment")

    def text(index: int) -> str:
        name, zero, _ = pread(MAX_NAME_BYTES, at + index).partition(b"\0")
        if not zero:
            raise ElfError("a name without an end")
        return name.decode("utf-8", "surrogateescape")

    return Elf(
        abi=abi,
        soname="" if soname is None else text(soname),
        needed=tuple(text(index) for index in needed),
    )
