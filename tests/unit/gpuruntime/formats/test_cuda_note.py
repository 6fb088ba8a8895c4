# SPDX-License-Identifier: Apache-2.0
"""The note of CUDA's compatibility library, and whether the library is used on a host."""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import noted

from gpuruntime.formats import cuda_note
from gpuruntime.formats.cuda_note import CudaNote, NoteError

NOTE = CudaNote("12.9", noted.DRIVERS)
COMPAT = "575.57.08"


class Reader:
    """Reads bytes, and counts them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.done = 0

    def __call__(self, offset: int, size: int) -> bytes:
        """Return what there is of *size* bytes at *offset*."""
        part = self.data[offset : offset + size]
        self.done += len(part)
        return part


def read(data: bytes) -> CudaNote | None:
    """Return the note in *data*, read within the limit."""
    reader = Reader(data)
    try:
        return cuda_note.read_note(reader)
    finally:
        assert reader.done <= 64 << 10


@pytest.mark.parametrize(
    ("driver", "cuda", "is_used"),
    [
        ("", "12.8", True),
        ("", "12.9", False),
        ("", "12.10", False),
        ("590.44.01", "", False),
        ("570.211.01", "", True),
        ("575.10.10", "", True),
        ("575.57.08", "", False),
        ("575.57.8", "", False),
        ("575.57.7", "", True),
        ("575.99.99", "", False),
        ("", "", False),
        # The driver is what counts, if it is known.
        ("590.44.01", "12.8", False),
        ("570.211.01", "12.9", True),
        ("no version", "12.8", True),
        ("no version", "no version", False),
        ("580", "", False),
        ("550", "", True),
    ],
)
def test_a_library_with_a_note(driver: str, cuda: str, is_used: bool) -> None:
    """It says which drivers it runs on, and is of use where it is newer than what there is."""
    assert cuda_note.is_usable(COMPAT, NOTE, driver, cuda) is is_used


@pytest.mark.parametrize(
    ("compat", "driver", "cuda", "is_used"),
    [
        ("222.88", "99.77", "", True),
        ("570.124.06", "515.105.01", "", True),
        ("570.124.06", "580.1", "", False),
        ("570.124.06", "570.1", "", False),
        ("570.124.06", "", "", False),
        ("570.124.06", "515.105.01", "12.1", False),
        ("570.124.06", "", "12.1", False),
        ("a.b", "515.105.01", "", False),
        ("570.124.06", "x", "", False),
    ],
)
def test_a_library_without_a_note(compat: str, driver: str, cuda: str, is_used: bool) -> None:
    """From before there were notes: newer by a major version, and compared as numbers."""
    assert cuda_note.is_usable(compat, None, driver, cuda) is is_used


@pytest.mark.parametrize(
    "version", ["", ".", "1.", ".1", "1..2", "v1", "1 ", "1\n", "٣", "1" * 40]
)
def test_what_is_no_version_is_none(version: str) -> None:
    """Versions come from names of files of the image and from its notes."""
    assert cuda_note.parse_version(version) is None
    assert not cuda_note.is_usable(version, CudaNote(version, (570,)), "570.1", "12.1")


@pytest.mark.parametrize("width", [1, 2])
def test_the_note_is_read(width: int) -> None:
    """In both widths, behind notes of others."""
    assert read(noted.library(width=width)) == NOTE
    others = noted.note(b"x", b"GNU\0") + noted.note(b"", b"")
    assert read(noted.of_note(others + noted.note(noted.TEXT), width=width)) == NOTE
    assert read(noted.of_note(noted.note(noted.TEXT, b"NVIDIA Corporation"), width=width)) == NOTE
    assert read(noted.library(b'{"Driver": null}')) == CudaNote("", ())


def test_a_library_without_the_section_has_no_note() -> None:
    """That is no error: it is from before there were notes."""
    assert read(noted.library(section=b".note.gnu.build-id")) is None
    assert read(noted.library(section=noted.SECTION + b".2")) is None
    tiny = Path(__file__).parents[3] / "data" / "elf" / "libtiny-x86-64.so"
    assert read(tiny.read_bytes()) is None


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc, to build a library with a note")
def test_the_note_of_a_linker_is_read(tmp_path: Path) -> None:
    """The linker's idea of the format, not ours."""
    (tmp_path / "note").write_bytes(noted.note(noted.TEXT))
    source = f'.section {noted.SECTION.decode()},"a",@note\n.incbin "{tmp_path}/note"\n'
    subprocess.run(
        ["gcc", "-shared", "-nostdlib", "-x", "assembler", "-", "-o", tmp_path / "x.so"],
        input=source, text=True, check=True,
    )  # fmt: skip
    assert read((tmp_path / "x.so").read_bytes()) == NOTE


def damaged(at: int, form: str, value: int) -> bytes:
    """Return the library with one number of it changed."""
    data = bytearray(noted.library())
    struct.pack_into(form, data, at, value)
    return bytes(data)


TABLE = len(noted.library()) - 3 * 64
DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "text": b"a compatibility library" * 9,
    "magic": b"\x7fELF",
    "big endian": noted.library()[:5] + b"\2" + noted.library()[6:],
    "class": noted.library()[:4] + b"\3" + noted.library()[5:],
    "table beyond": damaged(40, "<Q", (1 << 64) - 1),
    "table at the end": damaged(40, "<Q", len(noted.library())),
    "header size": damaged(58, "<H", 63),
    "many sections": damaged(60, "<H", 0xFFFF),
    "names index": damaged(62, "<H", 3),
    "names beyond": damaged(TABLE + 2 * 64 + 24, "<Q", 1 << 63),
    "names of 4 GiB": damaged(TABLE + 2 * 64 + 32, "<Q", 1 << 32),
    "note of 4 GiB": damaged(TABLE + 64 + 32, "<Q", 1 << 32),
    "note of 17 KiB": noted.library(b"9" * (17 << 10)),
    "note beyond": damaged(TABLE + 64 + 24, "<Q", 1 << 40),
    "owner of 4 GiB": damaged(64, "<I", 0xFFFFFFFF),
    "text of 4 GiB": damaged(68, "<I", 0xFFFFFFFF),
    "of somebody else": noted.of_note(noted.note(noted.TEXT, b"NVIDIA\0")),
    "no note": noted.of_note(b"12345"),
    "no JSON": noted.library(b"{"),
    "no UTF-8": noted.library(b'{"\xff": 1}'),
    "nested": noted.library(b"[" * 16000),
    "list": noted.library(b"[]"),
    "driver text": noted.library(b'{"Driver": ["550"]}'),
    "driver object": noted.library(b'{"Driver": {"550": 1}}'),
    "driver truth": noted.library(b'{"Driver": [true]}'),
    "driver fraction": noted.library(b'{"Driver": [5.5]}'),
    "CUDA number": noted.library(b'{"CUDA Version": 12.9}'),
    "long number": noted.library(b'{"Driver": [' + b"9" * 5000 + b"]}"),
}


@pytest.mark.parametrize("data", DAMAGE.values(), ids=DAMAGE)
def test_name_04_a_damaged_file_is_one_kind_of_error(data: bytes) -> None:
    """Sizes lie, tables overlap, files end; little is read all the same."""
    with pytest.raises(NoteError):
        read(data)


def unbounded(read_at: Callable[[int, int], bytes]) -> object:
    """Return what a reader finds that believes the file. Never copy this."""
    (table,) = struct.unpack("<Q", read_at(40, 8))
    name, _, _, _, offset, size = struct.unpack("<IIQQQQ", read_at(table + 64, 40))
    content = read_at(offset, size)
    owner, length, _ = struct.unpack_from("<III", content)
    start = 12 + (owner + 3 & -4)
    return name, json.loads(content[start : start + length])


def test_name_04_control_a_reader_without_limits() -> None:
    """It reads the note as ours does, and of a large one more than 64 KiB, or raises anything."""
    assert unbounded(Reader(noted.library()))
    reader = Reader(noted.library(json.dumps({"Driver": [0] * 40000}).encode()))
    unbounded(reader)
    assert reader.done > 64 << 10
    kinds = set()
    for data in DAMAGE.values():
        try:
            unbounded(Reader(data))
        except Exception as error:  # noqa: BLE001 (which one, is the question)
            kinds.add(type(error).__name__)
    assert kinds - {"NoteError"}


@pytest.mark.parametrize("width", [1, 2])
def test_name_04_every_cut_of_the_file(width: int) -> None:
    """It ends at every byte."""
    data = noted.library(width=width)
    for length in range(len(data)):
        with pytest.raises(NoteError):
            read(data[:length])


def test_name_04_random_bytes_in_the_file() -> None:
    """A note, none, or the one error."""
    rng = random.Random(4)
    outcomes = set()
    for _ in range(3000):
        data = bytearray(noted.library(width=rng.choice((1, 2))))
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        try:
            outcomes.add(type(read(bytes(data))).__name__)
        except NoteError:
            outcomes.add("refused")
    assert outcomes == {"CudaNote", "NoneType", "refused"}
