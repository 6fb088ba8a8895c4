# SPDX-License-Identifier: Apache-2.0
"""Our ELF reader against pyelftools, on every ELF file of this machine's library directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_roots import elf as library
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from hostile import noted
from hypothesis import given, settings
from hypothesis import strategies as st
from simhost import artefacts

from gpuruntime.formats import cuda_note, elf

DATA = Path(__file__).resolve().parents[3] / "data" / "elf"
# Not below: plugins of other programs are there, as in the directories themselves.
DIRECTORIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib32", "/usr/local/lib", "/usr/sbin")
ABIS = {
    ("EM_X86_64", 64): "x86-64",
    ("EM_X86_64", 32): "x32",
    ("EM_386", 32): "i386",
    ("EM_AARCH64", 64): "aarch64",
    ("EM_PPC64", 64): "ppc64le",
}
NOTE_TYPE = 7
SECTIONS = (b".note.gnu.build-id", b".note.ABI-tag", cuda_note.SECTION)


def elf_files(*directories: Path | str) -> Iterator[Path]:
    """Return the ELF files of *directories* and of their directories for one architecture."""
    places = [Path(directory) for directory in directories]
    places += [place for directory in places for place in directory.glob("*-linux-*")]
    real = {Path(os.path.realpath(path)) for place in places for path in place.glob("*")}
    for path in sorted(real):
        if path.is_file():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def by_pyelftools(path: Path) -> tuple[elf.Elf, bool, list[bytes | None]]:
    """Return what our reader is to say of a program or library; raise ELFError for others."""
    with path.open("rb") as file:
        theirs: Any = ELFFile(file)
        if theirs["e_type"] not in ("ET_EXEC", "ET_DYN") or not theirs.little_endian:
            raise ELFError(theirs["e_type"])
        segments = list(theirs.iter_segments())
        tags = [
            tag
            for segment in segments
            if segment["p_type"] == "PT_DYNAMIC"
            for tag in segment.iter_tags()
        ]
        sonames = [tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"]
        needed = tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED")
        abi = ABIS.get((theirs["e_machine"], theirs.elfclass), "other")
        loaders = [s.get_interp_name() for s in segments if s["p_type"] == "PT_INTERP"]
        is_static = theirs.elfclass == 64 and not loaders
        sections = [theirs.get_section_by_name(name.decode()) for name in SECTIONS]
        contents = [
            s.data() if s is not None and s["sh_type"] == "SHT_NOTE" else None for s in sections
        ]
    loader = loaders[0] if loaders else ""
    return elf.Elf(abi, sonames[0] if sonames else None, needed, loader), is_static, contents


def by_us(path: Path) -> tuple[elf.Elf, bool, list[bytes | None]]:
    """Return what our reader says of a program or library; raises ElfError."""
    data = path.read_bytes()
    with path.open("rb") as file:
        names = elf.read(file)

    def read_at(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    sections = [elf.read_section(read_at, name, NOTE_TYPE) for name in SECTIONS]
    return names, elf.is_static_program(data), sections


def differences(*directories: Path | str) -> tuple[int, list[str]]:
    """Return how many files there are in *directories*, and where the two readers differ."""
    count, differing = 0, []
    for path in elf_files(*directories):
        try:
            theirs: object = by_pyelftools(path)
        except ELFError:
            theirs = None
        try:
            ours: object = by_us(path)
        except elf.ElfError:
            ours = None
        count += 1
        if ours != theirs:
            differing.append(f"{path}: {ours} is not {theirs}")
    return count, differing


@pytest.mark.slow
def test_every_elf_file_of_the_machine_reads_as_by_pyelftools() -> None:
    """Libraries of many linkers and languages, objects and static programs among them."""
    count, differing = differences(*DIRECTORIES)
    assert differing == []
    assert count > 20


@pytest.mark.slow
def test_the_simulated_driver_and_our_samples_read_as_by_pyelftools() -> None:
    """What the other tests put into driver roots."""
    tree = artefacts.driver_tree("550.163.01")
    folders = {path.parent for path in tree.rglob("*.so*")}
    count, differing = differences(*folders, DATA)
    assert differing == []
    assert count > 20


@pytest.mark.parametrize("width", [1, 2])
def test_the_note_of_cuda_reads_as_by_pyelftools(width: int, tmp_path: Path) -> None:
    """The one section whose content we use."""
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(noted.library(width=width))
    with path.open("rb") as file:
        theirs: Any = ELFFile(file).get_section_by_name(cuda_note.SECTION.decode())
        content = theirs.data()
    data = path.read_bytes()
    read = elf.read_section(lambda at, size: data[at : at + size], cuda_note.SECTION, NOTE_TYPE)
    assert read == content


SAMPLES = st.sampled_from(
    [
        *((DATA / name).read_bytes() for name in sorted(os.listdir(DATA)) if "tiny." not in name),
        *(library("libx.so.1", ["liby.so"], abi) for abi in ("x86-64", "i386")),
        *(noted.library(width=width) for width in (1, 2)),
    ]
)
NUMBERS = st.sampled_from([0, 1, 2, 3, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, (1 << 63) - 1])
DAMAGE = st.lists(
    st.tuples(st.integers(0, 400), st.sampled_from([1, 2, 4, 8]), NUMBERS), max_size=6
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(SAMPLES, DAMAGE, st.integers(0, 1 << 14))
def test_a_damaged_file_raises_nothing_but_our_error(
    sample: bytes, damage: list[tuple[int, int, int]], length: int
) -> None:
    """By any of the three ways to read."""
    data = bytearray(sample)
    for at, size, number in damage:
        data[at : at + size] = (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    content = bytes(data[:length])

    def read_at(offset: int, size: int) -> bytes:
        return content[offset : offset + size]

    for read in (
        lambda: elf.read(content),
        lambda: elf.read_section(read_at, cuda_note.SECTION, NOTE_TYPE),
    ):
        try:
            read()
        except elf.ElfError:
            pass
    assert elf.is_static_program(content) in (True, False)
