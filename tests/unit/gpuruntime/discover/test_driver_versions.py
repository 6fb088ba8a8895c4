# SPDX-License-Identifier: Apache-2.0
"""Which driver is taken where there are two, half of one, one elsewhere, or none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from driver_roots import (
    ALL,
    COMPAT32,
    COMPUTE,
    NVML,
    OPEN_MODULE_TEXT,
    OTHER,
    VERSION,
    Tree,
    build,
    elf,
)

from gpuruntime.discover import user_space_version
from gpuruntime.discover.user_space import DriverRoot, find_driver, find_nvml
from gpuruntime.errors import DiscoveryError, DriverError, GpuRuntimeError
from gpuruntime.model import Driver

LIBRARIES = "/usr/lib64"
# Not this machine's.
NOWHERE: tuple[str, ...] = ()


def found(tree: Tree, driver_version: str | None = None) -> Driver:
    """Return the driver in *tree*."""
    root = DriverRoot(str(tree.path))
    return find_driver(root, driver_version, native="x86-64", elsewhere=NOWHERE)


def nvml(tree: Tree) -> str:
    """Return the path of NVML in *tree*."""
    path = find_nvml(DriverRoot(str(tree.path)), native="x86-64", elsewhere=NOWHERE)
    return path.removeprefix(str(tree.path))


def versions(driver: Driver) -> set[str]:
    """Return the versions in the names of the libraries that have the driver's."""
    return {
        lib.host_path.partition(".so.")[2]
        for lib in driver.libraries
        if not lib.soname.startswith("libnvidia-egl-gbm")
    }


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return the root of an installed driver without the files of graphics."""
    made = Tree(tmp_path / "root")
    made.libraries(LIBRARIES, COMPUTE)
    return made


@pytest.mark.parametrize(
    "text",
    [
        OPEN_MODULE_TEXT,
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Sep  4\nGCC version:  12.2.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {}  Release Build\n",
    ],
    ids=["open", "proprietary", "aarch64"],
)
def test_the_module_tells_its_version(text: str, tree: Tree) -> None:
    """And not that of the compiler."""
    tree.module(VERSION, text)
    assert user_space_version.of_module(DriverRoot(str(tree.path))) == VERSION
    assert found(tree).version == VERSION


@pytest.mark.parametrize("text", ["", "nothing\n", "Kernel Module  550\n", "\xff\xfe"])
def test_a_module_without_a_version_is_none(text: str, tree: Tree) -> None:
    """Then the libraries tell."""
    tree.file("/proc/driver/nvidia/version", text)
    assert found(tree).version == VERSION


def test_of_two_drivers_side_by_side_the_loaded_one_is_taken(tree: Tree) -> None:
    """Whichever the links lead to; and the other is not a problem."""
    other = Tree(tree.path, OTHER)
    for library in COMPUTE:
        other.library(LIBRARIES, library, links=False)
    for loaded in (VERSION, OTHER):
        tree.module(loaded)
        driver = found(tree)
        assert driver.version == loaded
        assert versions(driver) == {loaded}
        assert driver.problems == ()
        assert nvml(tree) == f"{LIBRARIES}/libnvidia-ml.so.{loaded}"
    for asked in (VERSION, OTHER):
        assert versions(found(tree, asked)) == {asked}


def test_of_two_drivers_in_two_directories_the_one_in_use_is_taken(tmp_path: Path) -> None:
    """As Debian keeps a legacy driver beside the current one."""
    tree = build(tmp_path / "root", "debian")
    other = Tree(tree.path, OTHER)
    place = "/usr/lib/x86_64-linux-gnu/nvidia"
    other.libraries(f"{place}/tesla-535", flat=True)
    assert versions(found(tree)) == {VERSION}
    for library in ALL:
        name = library.soname
        if name:
            alternative = tree.at(f"/etc/alternatives/glx--{name}-x86_64-linux-gnu")
            alternative.unlink()
            alternative.symlink_to(f"{place}/tesla-535/{name}")
    driver = found(tree)
    assert versions(driver) == {OTHER}
    assert nvml(tree) == f"{place}/tesla-535/libnvidia-ml.so.{OTHER}"
    # The 32-bit half did not change with it.
    assert all("/i386-linux-gnu" in problem for problem in driver.problems)
    assert f"libcuda.so.{VERSION}" in driver.problems[-1]


def test_a_module_of_another_version_is_named_with_both(tree: Tree) -> None:
    """B036: an upgrade before the reboot."""
    tree.module("550.90.07")
    for ask in (lambda: found(tree), lambda: nvml(tree), lambda: found(tree, "550.90.07")):
        with pytest.raises(DriverError) as caught:
            ask()
        assert "driver 550.90.07 is loaded" in caught.value.message
        assert f"are of {VERSION}" in caught.value.message
        assert "reboot" in str(caught.value.hint)


def test_libcuda_and_nvml_of_two_versions_are_an_error(tree: Tree) -> None:
    """Half an upgrade: no pair of them works."""
    for path in tree.at(LIBRARIES).glob("libnvidia-ml*"):
        path.unlink()
    with pytest.raises(DiscoveryError, match=rf'no "libnvidia-ml.so.{VERSION}".*{LIBRARIES}'):
        found(tree)
    tree.library(LIBRARIES, NVML, version=OTHER)
    with pytest.raises(DiscoveryError) as caught:
        found(tree)
    assert VERSION in caught.value.message
    assert f"libnvidia-ml is of {OTHER}" in caught.value.message


def test_what_only_another_driver_has_is_left_out_and_told(tree: Tree) -> None:
    """A package that was not upgraded with the others."""
    ptx = next(library for library in COMPUTE if "ptx" in library.name)
    tree.library(LIBRARIES, ptx, version=OTHER, links=False)
    assert found(tree).problems == ()
    tree.at(f"{LIBRARIES}/{ptx.file(VERSION)}").unlink()
    driver = found(tree)
    assert versions(driver) == {VERSION}
    needed, problem = driver.problems
    assert "is missing, which" in needed
    assert problem == (
        f"left out, because they are not of driver {VERSION}: {ptx.file(OTHER)} in "
        f'"{tree.path}{LIBRARIES}"'
    )


def test_left_overs_of_what_a_driver_no_longer_has_are_nothing(tree: Tree) -> None:
    """libnvidia-ifr ended with driver 470."""
    tree.file(f"{LIBRARIES}/libnvidia-ifr.so.470.42.01", elf("libnvidia-ifr.so.1"))
    tree.file(f"{LIBRARIES}/libnvidia-container.so.1.17.8", elf("libnvidia-container.so.1"))
    assert found(tree).problems == ()


def test_32_bit_libraries_of_another_driver_are_left_out_and_told(tmp_path: Path) -> None:
    """They come in packages of their own."""
    tree = build(tmp_path / "root", "rhel")
    for path in tree.at("/usr/lib").rglob("*.so*"):
        path.unlink()
    assert found(tree).problems == ()
    Tree(tree.path, OTHER).libraries("/usr/lib", COMPAT32, abi="i386")
    driver = found(tree)
    assert {lib.abi for lib in driver.libraries} == {"x86-64"}
    assert any(f'in "{tree.path}/usr/lib"' in problem for problem in driver.problems)


def test_a_library_that_another_needs_is_missed(tree: Tree) -> None:
    """Half an installation: the loader would say so in the container."""
    egl = next(library for library in ALL if library.name == "libnvidia-eglcore")
    tree.library(LIBRARIES, egl)
    tree.file(f"{LIBRARIES}/libnvidia-new.so.{VERSION}", elf(None, [f"libnv-x.so.{VERSION}"]))
    tree.file(
        f"{LIBRARIES}/libnvidia-two.so.{VERSION}",
        elf(None, [f"libnv-x.so.{VERSION}", "libGL.so.1", "libX11.so.6"]),
    )
    place = f"{tree.path}{LIBRARIES}"
    assert list(found(tree).problems) == [
        f'"{name}.so.{VERSION}" is missing, which "{place}/{needs}.so.{VERSION}" needs{more}'
        for name, needs, more in (
            ("libnvidia-glsi", "libnvidia-eglcore", ""),
            ("libnvidia-gpucomp", "libnvidia-eglcore", ""),
            ("libnv-x", "libnvidia-new", " and 1 more"),
        )
    ]


@pytest.mark.parametrize("asked", ["", "550", "*.*", "550.1/../x", "550.163.01\n", "-1.2"])
def test_a_version_that_is_none_is_refused(asked: str, tree: Tree) -> None:
    """It would be part of paths."""
    with pytest.raises(DriverError, match="cannot determine the driver version"):
        found(tree, asked)


def test_a_version_that_is_not_there_is_named_with_what_is(tree: Tree) -> None:
    """NVML's word counts."""
    with pytest.raises(GpuRuntimeError) as caught:
        found(tree, "999.88.77")
    assert "999.88.77" in caught.value.message
    assert VERSION in caught.value.message


def test_no_driver_says_what_was_searched(tmp_path: Path) -> None:
    """B007: the most pasted error of all."""
    tree = Tree(tmp_path / "root")
    tree.directory("/usr/lib64")
    tree.directory("/usr/lib/x86_64-linux-gnu")
    for ask in (lambda: found(tree), lambda: nvml(tree)):
        with pytest.raises(DriverError) as caught:
            ask()
        assert f'"{tree.path}"' in caught.value.message
        assert "searched: /usr/lib64, /usr/lib/x86_64-linux-gnu, /usr/lib" in caught.value.message
        assert "--driver-root" in str(caught.value.hint)


@pytest.mark.parametrize("layout", ["ubuntu", "opt", "debian", "cache-only"])
def test_a_driver_elsewhere_is_told(layout: str, tmp_path: Path) -> None:
    """B007: the config says /run/nvidia/driver, and the driver is on the host."""
    empty = Tree(tmp_path / "empty")
    there = build(tmp_path / "there", layout)
    places = [str(tmp_path / "gone"), str(empty.path), str(there.path)]
    root = DriverRoot(str(empty.path))
    for ask in (
        lambda: find_nvml(root, native="x86-64", elsewhere=places),
        lambda: find_driver(root, native="x86-64", elsewhere=places),
    ):
        with pytest.raises(DriverError) as caught:
            ask()
        assert f'there is one below "{there.path}"' in caught.value.message
        assert f'use the driver root "{there.path}"' in str(caught.value.hint)


def test_a_loaded_module_without_libraries_is_no_driver(tmp_path: Path) -> None:
    """The module alone; what is missing is everything."""
    tree = Tree(tmp_path / "root")
    tree.module(VERSION)
    with pytest.raises(DriverError, match=r'no "libnvidia-ml\.so\.1"'):
        found(tree)


def test_the_first_versions_of_nvvm_were_not_the_driver_s(tree: Tree) -> None:
    """Theirs is no other driver's either."""
    tree.file(f"{LIBRARIES}/libnvidia-nvvm.so.4.0.0", elf("libnvidia-nvvm.so.4"))
    driver = found(tree)
    assert f"{LIBRARIES}/libnvidia-nvvm.so.4.0.0" in {
        lib.container_path for lib in driver.libraries
    }
    assert driver.problems == ()


def test_nvml_without_its_link_is_found(tree: Tree) -> None:
    """The loader's cache was not made since."""
    tree.module(VERSION)
    tree.at(f"{LIBRARIES}/libnvidia-ml.so.1").unlink()
    assert nvml(tree) == f"{LIBRARIES}/libnvidia-ml.so.{VERSION}"


def test_nvml_under_its_soname_alone_is_found(tmp_path: Path) -> None:
    """Its version is what it says when it is asked."""
    tree = Tree(tmp_path / "root")
    tree.file(f"{LIBRARIES}/libnvidia-ml.so.1", elf("libnvidia-ml.so.1"))
    tree.module(VERSION)
    assert nvml(tree) == f"{LIBRARIES}/libnvidia-ml.so.1"


def test_a_copy_in_a_second_directory_is_not_taken_twice(tree: Tree) -> None:
    """The loader takes the first."""
    shutil.copytree(tree.at(LIBRARIES), tree.at("/usr/lib"), symlinks=True)
    assert {os.path.dirname(lib.container_path) for lib in found(tree).libraries} == {LIBRARIES}


def test_of_two_versions_of_a_library_with_its_own_the_linked_is_taken(tree: Tree) -> None:
    """They do not change with the driver's, and left-overs stay."""
    for own, link in (("1.1.0", False), ("1.1.2", True), ("1.1.9", False)):
        tree.file(f"{LIBRARIES}/libnvidia-egl-gbm.so.{own}", elf("libnvidia-egl-gbm.so.1"))
        if link:
            tree.link(f"{LIBRARIES}/libnvidia-egl-gbm.so.1", f"libnvidia-egl-gbm.so.{own}")
    gbm = [lib for lib in found(tree).libraries if lib.soname == "libnvidia-egl-gbm.so.1"]
    assert [lib.container_path for lib in gbm] == [f"{LIBRARIES}/libnvidia-egl-gbm.so.1.1.2"]


def test_the_module_is_asked_where_it_says_that_it_is_empty() -> None:
    """As every file of /proc does: nothing but to read it tells what is in it."""
    assert os.stat("/proc/version").st_size == 0
    assert b"Linux" in (DriverRoot("/").read("/proc/version", 1000) or b"")
