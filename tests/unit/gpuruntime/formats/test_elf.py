# SPDX-License-Identifier: Apache-2.0
"""What elf.read says of real, damaged and hostile files."""

from __future__ import annotations

import io
import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from gpuruntime.formats import elf
from gpuruntime.formats.ldcache_merge import ABI_FLAGS

DATA = Path(__file__).resolve().parents[3] / "data" / "elf"
LIBRARY = (DATA / "libtiny-x86-64.so").read_bytes()

# The place of each header field and how struct writes it, for the two classes.
FIELDS64 = {"type": (16, "<H"), "machine": (18, "<H"), "phoff": (32, "<Q"), "shoff": (40, "<Q")}
FIELDS64 |= {"flags": (48, "<I"), "phentsize": (54, "<H"), "phnum": (56, "<H")}
FIELDS32 = {"machine": (18, "<H"), "flags": (36, "<I")}
SEGMENT64 = struct.Struct("<IIQQQQQQ")  # type, flags, offset, address, physical, bytes, …
DYNAMIC64 = struct.Struct("<QQ")


def patched(data: bytes, place: tuple[int, str], value: int) -> bytes:
    """Return *data* with *value* written at *place*."""
    at, code = place
    return data[:at] + struct.pack(code, value) + data[at + struct.calcsize(code) :]


def segment(data: bytes, kind: int) -> tuple[int, tuple[int, ...]]:
    """Return where the first program header of *kind* is, and its fields."""
    (start,) = struct.unpack_from("<Q", data, 32)
    (count,) = struct.unpack_from("<H", data, 56)
    for at in range(start, start + count * SEGMENT64.size, SEGMENT64.size):
        fields = SEGMENT64.unpack_from(data, at)
        if fields[0] == kind:
            return at, fields
    raise AssertionError(kind)


def with_dynamic(*rows: tuple[int, int], keep: tuple[int, ...] = (5, 10)) -> bytes:
    """Return LIBRARY with *rows* for its dynamic section, and of the old ones tags *keep*."""
    offset, length = segment(LIBRARY, 2)[1][2], segment(LIBRARY, 2)[1][5]
    old = DYNAMIC64.iter_unpack(LIBRARY[offset : offset + length])
    new = [*rows, *(row for row in old if row[0] in keep), (0, 0)]
    packed = b"".join(DYNAMIC64.pack(*row) for row in new)
    assert len(packed) <= length
    return LIBRARY[:offset] + packed + LIBRARY[offset + len(packed) :]


@pytest.mark.parametrize("abi", ["x86-64", "i386", "x32"])
def test_a_real_library_of_each_class_is_read(abi: str) -> None:
    """Bytes and files give the same, and the ABI is one that the loader cache knows."""
    path = DATA / f"libtiny-{abi}.so"
    expected = elf.Elf(abi, "libtiny.so.1", ("libdep.so.2",))
    assert elf.read(path.read_bytes()) == expected
    with path.open("rb") as file:
        assert elf.read(file) == expected
        assert not file.closed
    assert abi in ABI_FLAGS


def test_a_library_without_a_soname_has_none() -> None:
    """The driver's own plugins have none; None is not the empty name."""
    assert elf.read((DATA / "libnameless.so").read_bytes()) == elf.Elf("x86-64", None, ())


def test_a_static_program_needs_nothing() -> None:
    """No dynamic section is not an error: driver roots hold static programs."""
    assert elf.read((DATA / "tiny-static").read_bytes()) == elf.Elf("x86-64", None, ())


def test_section_headers_are_not_needed() -> None:
    """Loaders do not read them, and sstrip removes them."""
    assert elf.read(patched(LIBRARY, FIELDS64["shoff"], 1 << 60)).soname == "libtiny.so.1"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not here")
@pytest.mark.parametrize("name", ["libc.so.6", "libm.so.6", "libstdc++.so.6", "libcrypto.so.3"])
def test_the_machines_libraries_read_as_by_readelf(name: str) -> None:
    """Real libraries of many pages and segments, against an independent reader."""
    found = [d / name for d in map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"))]
    path = next((p for p in found if p.exists()), None)
    if path is None:
        pytest.skip(f"{name} is not on this machine")
    text = subprocess.run(
        ["readelf", "-dW", path], check=True, capture_output=True, text=True, env={"LC_ALL": "C"}
    ).stdout
    shown = re.findall(r"\((SONAME|NEEDED)\) .*\[(.*)\]", text)
    with path.open("rb") as file:
        library = elf.read(file)
    assert [library.soname] == [name for tag, name in shown if tag == "SONAME"]
    assert list(library.needed) == [name for tag, name in shown if tag == "NEEDED"]


@pytest.mark.parametrize(
    ("sample", "machine", "flags", "abi"),
    [
        pytest.param("x86-64", 183, 0, "aarch64", id="aarch64"),
        pytest.param("x86-64", 21, 2, "ppc64le", id="ppc64le"),
        pytest.param("x86-64", 243, 5, "riscv64", id="riscv64 lp64d"),
        pytest.param("x86-64", 243, 1, "", id="riscv64 soft float"),
        pytest.param("i386", 243, 5, "", id="riscv32"),
        pytest.param("i386", 40, 0x5000400, "arm-hard-float", id="arm hard float"),
        pytest.param("i386", 40, 0x5000200, "arm-soft-float", id="arm soft float"),
        pytest.param("i386", 183, 0, "", id="aarch64 ilp32"),
        pytest.param("x86-64", 3, 0, "", id="i386 in the wrong class"),
        pytest.param("x86-64", 258, 0, "", id="loongarch"),
    ],
)
def test_machine_class_and_flags_make_the_abi(
    sample: str, machine: int, flags: int, abi: str
) -> None:
    """A library of a foreign ABI must never be cached as one of the host's."""
    fields = FIELDS64 if sample == "x86-64" else FIELDS32
    data = (DATA / f"libtiny-{sample}.so").read_bytes()
    data = patched(patched(data, fields["machine"], machine), fields["flags"], flags)
    assert elf.read(data).abi == abi
    assert abi == "" or abi in ABI_FLAGS


DYNAMIC = segment(LIBRARY, 2)
FAR = (1 << 64) - 1
DAMAGED = {
    "an empty file": b"",
    "text": b"#!/bin/sh\nexec true\n" * 10,
    "class 3": patched(LIBRARY, (4, "B"), 3),
    "big-endian": patched(LIBRARY, (5, "B"), 2),
    "version 0": patched(LIBRARY, (6, "B"), 0),
    "an object file": patched(LIBRARY, FIELDS64["type"], 1),
    "a core dump": patched(LIBRARY, FIELDS64["type"], 4),
    "headers of another size": patched(LIBRARY, FIELDS64["phentsize"], 64),
    "65535 program headers": patched(LIBRARY, FIELDS64["phnum"], 0xFFFF),
    "program headers behind the end": patched(LIBRARY, FIELDS64["phoff"], len(LIBRARY)),
    "program headers nowhere": patched(LIBRARY, FIELDS64["phoff"], FAR),
    "a dynamic section behind the end": patched(LIBRARY, (DYNAMIC[0] + 8, "<Q"), len(LIBRARY)),
    "a dynamic section nowhere": patched(LIBRARY, (DYNAMIC[0] + 8, "<Q"), FAR),
    "a dynamic section of 1 EiB": patched(LIBRARY, (DYNAMIC[0] + 32, "<Q"), 1 << 60),
    "no string table": with_dynamic((14, 1), keep=(10,)),
    "a string table without a size": with_dynamic((14, 1), keep=(5,)),
    "a string table in no segment": with_dynamic((14, 1), (5, 1 << 40), keep=(10,)),
    "a name behind the string table": with_dynamic((14, 1 << 20)),
    "a name nowhere": with_dynamic((1, FAR)),
    "a name that the table cuts": with_dynamic((14, 1), (10, 2), keep=(5,)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_one_kind_of_error(data: bytes) -> None:
    """Callers catch ElfError alone; read from a file, offsets may not overflow seek either."""
    with pytest.raises(elf.ElfError):
        elf.read(data)
    with pytest.raises(elf.ElfError):
        elf.read(io.BytesIO(data))


def test_a_file_cut_anywhere_is_read_or_refused() -> None:
    """A download that broke off must not end in struct.error."""
    read = 0
    for size in range(len(LIBRARY)):
        try:
            assert elf.read(LIBRARY[:size]).soname == "libtiny.so.1"
            read += 1
        except elf.ElfError:
            pass
    assert 0 < read < len(LIBRARY)


def test_random_damage_is_read_or_refused() -> None:
    """Whatever a byte says, nothing but ElfError comes out, and no reading beyond the limits."""
    generator = random.Random(550)
    refused = 0
    for _ in range(3000):
        data = bytearray(LIBRARY)
        for _ in range(generator.choice((1, 2, 8))):
            at = generator.choice((generator.randrange(0x200), DYNAMIC[1][2] + 8))
            data[at + generator.randrange(8)] = generator.choice((0, 1, 0x7F, 0xFF))
        file = CountingFile(data)
        try:
            elf.read(file)
        except elf.ElfError:
            refused += 1
        assert file.count < 3 * elf.MAX_TABLE_BYTES
    assert 300 < refused < 3000


def test_a_name_longer_than_one_read_is_whole() -> None:
    """Names are read in pieces: the seams must not show."""
    size = segment(LIBRARY, 1)[0] + 32
    for length in (62, 63, 64, 65, 127, 128, 129, 4095):
        name = b"lib" + b"x" * (length - 6) + b".so"
        start = len(LIBRARY)
        data = with_dynamic((14, 0), (10, length + 1), (5, start), keep=())
        # One segment from the file's start at address 0 holds it all.
        data = patched(data + name + b"\0", (size, "<Q"), start + length + 1)
        data = patched(patched(data, (size - 24, "<Q"), 0), (size - 16, "<Q"), 0)
        assert elf.read(data).soname == name.decode()


def test_a_name_without_an_end_is_refused_early() -> None:
    """A string table of zeros turned to letters must not be read to its end."""
    size = segment(LIBRARY, 1)[0] + 32
    start = len(LIBRARY)
    data = with_dynamic((14, 0), (10, 1 << 20), (5, start), keep=())
    data = patched(data + b"x" * (1 << 20), (size, "<Q"), start + (1 << 20))
    data = patched(patched(data, (size - 24, "<Q"), 0), (size - 16, "<Q"), 0)
    file = CountingFile(data)
    with pytest.raises(elf.ElfError, match="does not end"):
        elf.read(file)
    assert file.count < 16 << 10


def test_too_many_needed_names_are_refused() -> None:
    """4096 names of 4 KiB each would be 16 MiB of work for a library that needs none."""
    count = 600
    start = len(LIBRARY)
    rows = DYNAMIC64.pack(5, 0) + DYNAMIC64.pack(10, 64) + DYNAMIC64.pack(1, 1) * count
    data = patched(LIBRARY + rows, (DYNAMIC[0] + 8, "<Q"), start)
    data = patched(data, (DYNAMIC[0] + 32, "<Q"), len(rows))
    with pytest.raises(elf.ElfError, match="600 needed libraries"):
        elf.read(data)


class CountingFile(io.BytesIO):
    """A file that counts the bytes that are read."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read and count."""
        data = super().read(size)
        self.count += len(data)
        return data


def test_nothing_at_an_offset_of_no_file_is_nothing() -> None:
    """Bytes and a file are read alike: a dynamic section of no bytes may be anywhere."""
    at, _ = segment(LIBRARY, 2)
    data = patched(patched(LIBRARY, (at + 8, "<Q"), 1 << 63), (at + 32, "<Q"), 0)
    assert elf.read(data) == elf.read(io.BytesIO(data)) == elf.Elf("x86-64", None, ())


def test_only_what_is_needed_is_read() -> None:
    """The driver's libcuda has 30 MB, and discovery reads dozens of such files."""
    file = CountingFile(LIBRARY + bytes(4 << 20))
    assert elf.read(file).soname == "libtiny.so.1"
    assert file.count < 2048
