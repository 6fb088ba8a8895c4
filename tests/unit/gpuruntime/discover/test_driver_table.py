# SPDX-License-Identifier: Apache-2.0
"""The table of the driver's files says nothing twice, and what it says can be found."""

from __future__ import annotations

import fnmatch
import itertools
import re
from pathlib import Path

import pytest
from driver_roots import ALL, VERSION, Tree, build, elf
from simhost.artefacts import Library

from gpuruntime.discover import driver_table
from gpuruntime.discover.user_space import DriverRoot, find_driver
from gpuruntime.model import Driver
from gpuruntime.plan import driver_files
from gpuruntime.request import capabilities

ROWS = (
    *driver_table.LIBRARIES.values(),
    *driver_table.BINARIES,
    *driver_table.CONFIGS,
    *driver_table.DATA,
    *driver_table.FIRMWARES,
    *driver_table.SOCKETS,
    driver_table.MPS,
)
NEUTRAL = {
    *("libEGL", "libGL", "libGLESv1_CM", "libGLESv2", "libGLX", "libGLdispatch"),
    *("libOpenCL", "libOpenGL"),
}
# What the incumbent injects for each capability, where there are libraries of that name.
INCUMBENT = {
    "utility": "libnvidia-ml libnvidia-cfg libnvidia-nscq",
    "compute": """libcuda libcudadebugger libnvidia-opencl libnvidia-gpucomp
        libnvidia-ptxjitcompiler libnvidia-fatbinaryloader libnvidia-allocator libnvidia-compiler
        libnvidia-pkcs11 libnvidia-pkcs11-openssl3 libnvidia-nvvm libnvidia-tileiras""",
    "video": "libvdpau_nvidia libnvidia-encode libnvidia-opticalflow libnvcuvid",
    "graphics": """libnvidia-eglcore libnvidia-glcore libnvidia-tls libnvidia-glsi libnvidia-fbc
        libnvidia-ifr libnvidia-rtcore libnvoptix libGLX_nvidia libEGL_nvidia libGLESv2_nvidia
        libGLESv1_CM_nvidia libnvidia-glvkspirv libnvidia-cbl""",
    "ngx": "libnvidia-ngx",
}


def test_no_file_has_two_rows() -> None:
    """The second would never count."""
    keys = [(row.kind, row.name) for row in ROWS]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_whole(row: driver_table.Row) -> None:
    """A word that nobody knows would keep the file from every container."""
    assert row.capability in (*capabilities.ALL, driver_table.ALL, driver_table.NEVER)
    assert row.why
    assert re.fullmatch(r"(?:[0-9]{3})?", row.since)
    assert re.fullmatch(r"(?:[0-9]{3})?", row.until)
    assert not row.until or row.since <= row.until
    for link in row.links:
        assert re.fullmatch(r"(?:\.\./)?(?:FILE|SONAME)::[\w./-]+", link)


@pytest.mark.parametrize("pattern", ["", "*", "a", "*.*", "a*b", "*ab*.a", "aa*aa", "a**b"])
def test_a_pattern_means_what_it_does_elsewhere(pattern: str) -> None:
    """The table's own matching is held against fnmatch, on every name of up to four letters."""
    for length in range(5):
        for name in map("".join, itertools.product("ab.", repeat=length)):
            expected = fnmatch.fnmatchcase(name, pattern)
            assert driver_table.matches(name, pattern) is expected, name


def test_only_vendor_neutral_libraries_are_for_no_capability() -> None:
    """They are the image's."""
    never = {row.name for row in ROWS if row.capability == driver_table.NEVER}
    assert never == NEUTRAL


@pytest.mark.parametrize("capability", INCUMBENT)
def test_libraries_have_the_incumbent_s_capabilities(capability: str) -> None:
    """NVIDIA_DRIVER_CAPABILITIES means the same."""
    for name in INCUMBENT[capability].split():
        assert driver_table.LIBRARIES[name].capability == capability, name


def test_the_simulated_driver_has_only_what_the_table_has() -> None:
    """It was made after a real one."""
    assert {library.name for library in ALL} <= set(driver_table.LIBRARIES)


def driver(tmp_path: Path, *more: Library) -> Driver:
    """Return a driver with 64-bit and 32-bit libraries, and all files."""
    tree = build(tmp_path / "root", "ubuntu")
    for library in more:
        tree.library("/usr/lib/x86_64-linux-gnu", library)
    return find_driver(DriverRoot(str(tree.path)), native="x86-64")


def names(found: Driver) -> set[str]:
    """Return the stems of the libraries."""
    return {library.soname.partition(".so")[0] for library in found.libraries}


@pytest.mark.parametrize("words", [*INCUMBENT, "display", "compute compat32"])
def test_a_selection_needs_nothing_more(words: str, tmp_path: Path) -> None:
    """Closed over what its libraries need: the loader would not find it elsewhere."""
    whole = driver(tmp_path)
    chosen = driver_files.select(whole, words.split())
    there = {(library.abi, library.soname) for library in chosen.libraries}
    known = {(library.abi, library.soname) for library in whole.libraries}
    assert len({abi for abi, _ in there}) == (2 if "compat32" in words else 1)
    for library in chosen.libraries:
        assert {(library.abi, name) for name in library.needed} & known <= there


def test_graphics_brings_what_it_needs_of_compute(tmp_path: Path) -> None:
    """The compiler, and the allocator behind GBM that is opened by a name of its own."""
    found = names(driver_files.select(driver(tmp_path), ["graphics"]))
    assert {"libnvidia-gpucomp", "libnvidia-allocator"} <= found
    assert "libcuda" not in found


def test_an_unknown_library_comes_with_each_capability(tmp_path: Path) -> None:
    """And with none of them too."""
    found = driver(tmp_path, Library("libnvidia-tomorrow", "libnvidia-tomorrow.so.1"))
    for wanted in ([], *([name] for name in INCUMBENT)):
        assert "libnvidia-tomorrow" in names(driver_files.select(found, wanted))


def test_every_file_of_the_table_is_found(tmp_path: Path) -> None:
    """A row that finds nothing would be a promise that nobody keeps."""
    tree = Tree(tmp_path / "root")
    suffixes = {driver_table.VERSION: VERSION, "*": "1", "1": "1", "*.*": "1.0"}
    libraries = [
        row for row in driver_table.LIBRARIES.values() if row.kind == driver_table.LIBRARY
    ]
    for row in libraries:
        own = suffixes[row.suffixes[0]]
        tree.library("/usr/lib64", Library(row.name, f"{row.name}.so.1", own_version=own))
    for row in driver_table.CONFIGS:
        name = row.name.replace("*nvidia*", "10_nvidia").replace("*", "10-")
        tree.file(f"/usr/share/{name.replace(driver_table.VERSION, VERSION)}", "{}")
    tree.programs()
    tree.firmware()
    for row in driver_table.BINARIES:
        tree.file(f"/usr/bin/{row.name}", elf(None), 0o755)
    found = find_driver(DriverRoot(str(tree.path)), VERSION, native="x86-64")
    assert found.problems == ()
    wanted = {
        row.name: row.capability for row in libraries if row.capability != driver_table.NEVER
    }
    assert {lib.soname.partition(".so")[0]: lib.capability for lib in found.libraries} == wanted
    configs = [file for file in found.files if file.kind == driver_table.CONFIG]
    assert len(configs) == len(driver_table.CONFIGS)
    assert len([file for file in found.files if file.kind == driver_table.BINARY]) == len(
        driver_table.BINARIES
    )
