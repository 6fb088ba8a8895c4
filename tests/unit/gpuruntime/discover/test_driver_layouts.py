# SPDX-License-Identifier: Apache-2.0
"""The driver is found whole in the layout of each distribution, and nothing else with it."""

from __future__ import annotations

import os
import struct
from collections import Counter
from pathlib import Path

import pytest
from driver_roots import ALL, COMPAT32, LAYOUTS, PROGRAMS, VERSION, Tree, build
from simhost.artefacts import Library

from gpuruntime.discover import search_paths
from gpuruntime.discover.user_space import DriverRoot, find_driver, find_nvml
from gpuruntime.model import Driver
from gpuruntime.plan import driver_files, gpu_edits

COMPUTE_ONLY = tuple(library for library in ALL if library.name in ("libcuda", "libnvidia-ml"))
# Where the firmware is that is not in /lib/firmware.
FIRMWARE = {"arch": "/usr/lib/firmware", "own-tree": "/usr/local/nvidia/firmware"}
WITH_32_BIT = ("aarch64", "arch", "debian", "gentoo", "rhel", "ubuntu", "void")


def native(layout: str) -> str:
    """Return the ABI of the machines that have *layout*."""
    return "aarch64" if layout == "aarch64" else "x86-64"


def found(tree: Tree, layout: str = "", version: str | None = None) -> Driver:
    """Return the driver in *tree*."""
    return find_driver(DriverRoot(str(tree.path)), version, native=native(layout))


def names(libraries: tuple[Library, ...]) -> list[str]:
    """Return the file names of *libraries*, in order."""
    return sorted(library.file(VERSION) for library in libraries)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_library_is_found_once(layout: str, tmp_path: Path) -> None:
    """A library that is missing, or there twice, is a container in which something fails."""
    driver = found(build(tmp_path / "root", layout), layout)
    assert driver.problems == ()
    assert driver.version == VERSION
    first, *others = search_paths.abis(native(layout))
    there = {abi: [lib for lib in driver.libraries if lib.abi == abi] for abi in (first, *others)}
    assert sorted(os.path.basename(lib.host_path) for lib in there[first]) == names(ALL)
    assert sorted(os.path.basename(lib.host_path) for lib in there[others[0]]) == (
        names(COMPAT32) if layout in WITH_32_BIT else []
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_paths_are_real_and_container_paths_are_below_the_root(
    layout: str, tmp_path: Path
) -> None:
    """A mount's source must be no link, which anybody in its way could point elsewhere."""
    tree = build(tmp_path / "root", layout)
    driver = found(tree, layout)
    for library in driver.libraries:
        assert library.host_path == f"{tree.path}{library.container_path}"
    for item in (*driver.libraries, *driver.files):
        assert os.path.realpath(item.host_path) == item.host_path
        assert Path(item.host_path).is_file()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_firmware_and_icds_are_found(layout: str, tmp_path: Path) -> None:
    """Each where programs look for it, whatever links lead there."""
    driver = found(build(tmp_path / "root", layout), layout)
    kinds = {kind: [f for f in driver.files if f.kind == kind] for kind in ("binary", "firmware")}
    assert sorted(os.path.basename(f.container_path) for f in kinds["binary"]) == sorted(PROGRAMS)
    assert [f.container_path for f in kinds["firmware"]] == [
        f"{FIRMWARE.get(layout, '/lib/firmware')}/nvidia/{VERSION}/{name}"
        for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")
    ]
    configs = Counter(os.path.dirname(f.container_path) for f in driver.files)
    assert configs["/etc/vulkan/icd.d"] == (2 if layout == "rhel" else 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_version_is_told_by_the_libraries(layout: str, tmp_path: Path) -> None:
    """Without NVML the result is the same."""
    tree = build(tmp_path / "root", layout)
    assert found(tree, layout) == found(tree, layout, VERSION)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nvml_is_found(layout: str, tmp_path: Path) -> None:
    """It is the first thing that is asked."""
    tree = build(tmp_path / "root", layout)
    tree.module(VERSION)
    path = find_nvml(DriverRoot(str(tree.path)), native=native(layout))
    assert path.startswith(f"{tree.path}/")
    assert path.endswith(f"/libnvidia-ml.so.{VERSION}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_link_leads_to_a_file_of_the_container(layout: str, tmp_path: Path) -> None:
    """Of a link that leads nowhere a program makes a bad error message."""
    driver = found(build(tmp_path / "root", layout), layout)
    targets = {}
    for link in gpu_edits.links(driver):
        target, _, path = link.partition("::")
        assert targets.setdefault(path, target) == target, f"two targets for {path}"
    there = {item.container_path for item in (*driver.libraries, *driver.files)}
    for path in targets:
        end = path
        for _ in range(4):
            if end in targets:
                end = os.path.normpath(f"{os.path.dirname(end)}/{targets[end]}")
        assert end in there, f"{path} leads to {end}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_s_own_links_are_there_in_the_container(layout: str, tmp_path: Path) -> None:
    """B049: programs open libraries by paths that distributions have had for years."""
    tree = build(tmp_path / "root", layout)
    links = {link.partition("::")[2] for link in gpu_edits.links(found(tree, layout))}
    there = {
        f"/{place.relative_to(tree.path)}"
        for place in tree.path.rglob("lib*.so*")
        if place.is_symlink() and "alternatives" not in place.parts
    }
    # Of a farm of links, those by the files' whole names are not needed.
    whole = set(names(ALL))
    assert {path for path in there if os.path.basename(path) not in whole} <= links


def test_debian_s_links_lead_to_the_private_directory(tmp_path: Path) -> None:
    """Without the hop through /etc/alternatives, which a container does not have."""
    links = gpu_edits.links(found(build(tmp_path / "root", "debian")))
    place = "/usr/lib/x86_64-linux-gnu"
    assert f"nvidia/current/libcuda.so.1::{place}/libcuda.so.1" in links
    assert f"../nvidia/current/libvdpau_nvidia.so.1::{place}/vdpau/libvdpau_nvidia.so.1" in links


def test_the_ends_of_links_that_programs_open(tmp_path: Path) -> None:
    """The host may not have them: they come with development packages."""
    tree = Tree(tmp_path / "root")
    for library in ALL:
        tree.library("/usr/lib64", library, links=library.name in ("libcuda", "libnvidia-ml"))
    tree.at("/usr/lib64/libcuda.so").unlink()
    links = gpu_edits.links(found(tree))
    assert f"libcuda.so.{VERSION}::/usr/lib64/libcuda.so.1" in links
    assert "libcuda.so.1::/usr/lib64/libcuda.so" in links
    assert f"libGLX_nvidia.so.{VERSION}::/usr/lib64/libGLX_indirect.so.0" in links
    assert "libnvidia-opticalflow.so.1::/usr/lib64/libnvidia-opticalflow.so" in links
    assert "../libnvidia-allocator.so.1::/usr/lib64/gbm/nvidia-drm_gbm.so" in links
    assert "libnvidia-ml.so.1::/usr/lib64/libnvidia-ml.so" in links
    assert not any(link.endswith("/libnvcuvid.so") for link in links)


def test_32_bit_libraries_come_with_compat32(tmp_path: Path) -> None:
    """B100: a program of 32 bits falls back to software without them."""
    driver = found(build(tmp_path / "root", "rhel"))
    graphics = driver_files.select(driver, ["graphics"])
    assert {library.abi for library in graphics.libraries} == {"x86-64"}
    both = driver_files.select(driver, ["graphics", "compat32"])
    there = [library for library in both.libraries if library.abi == "i386"]
    assert f"/usr/lib/libGLX_nvidia.so.{VERSION}" in [lib.container_path for lib in there]
    icds = {f.container_path: f.capability for f in both.files if "icd.d" in f.container_path}
    assert icds["/etc/vulkan/icd.d/nvidia_icd.i686.json"] == "compat32"
    assert icds["/etc/vulkan/icd.d/nvidia_icd.x86_64.json"] == "graphics"


def test_width_and_machine_are_told_by_the_header(tmp_path: Path) -> None:
    """Where 32-bit files lie in /usr/lib64, or those of another machine anywhere."""
    tree = Tree(tmp_path / "root")
    tree.libraries("/usr/lib64", COMPAT32, abi="i386")
    tree.libraries("/usr/lib/aarch64-linux-gnu", abi="aarch64")
    tree.libraries("/usr/lib")
    tree.module(VERSION)
    driver = found(tree)
    assert {lib.abi for lib in driver.libraries} == {"x86-64", "i386"}
    assert {os.path.dirname(lib.container_path) for lib in driver.libraries} == {
        *("/usr/lib", "/usr/lib/vdpau", "/usr/lib64", "/usr/lib64/vdpau")
    }
    by_abi = {lib.abi: lib.host_path for lib in driver.libraries if lib.soname == "libcuda.so.1"}
    assert by_abi["i386"].startswith(f"{tree.path}/usr/lib64/")
    assert find_nvml(DriverRoot(str(tree.path)), native="x86-64").startswith(
        f"{tree.path}/usr/lib/"
    )


def test_a_cache_is_not_needed_and_not_believed(tmp_path: Path) -> None:
    """B045: none, one that no loader reads, and one that names files that are gone."""
    tree = build(tmp_path / "root", "rhel")
    whole = found(tree)
    for content in (b"", b"ld.so-1.7.0\0" + bytes(40), b"glibc-ld.so.cache1.1" + b"\xff" * 60):
        tree.file("/etc/ld.so.cache", content)
        assert found(tree) == whole
    tree.cache(
        ("libcuda.so.1", "/gone/libcuda.so.1", "x86-64"),
        ("libcuda.so.1", "/usr/lib64/libcuda.so.1", "i386"),
        ("libnvidia-ml.so.1", "/usr/lib/libnvidia-ml.so.1", "x86-64"),
    )
    assert {lib.host_path for lib in found(tree).libraries} == {
        lib.host_path for lib in whole.libraries
    }


def test_a_cache_of_another_kind_names_directories_all_the_same(tmp_path: Path) -> None:
    """B045: of an old C library, or made on a machine of the other byte order."""
    tree = build(tmp_path / "root", "cache-only")
    whole = found(tree)
    new = tree.at("/etc/ld.so.cache").read_bytes()
    (count,) = struct.unpack_from("<I", new, 20)
    for order in "<>":
        table, strings = b"", b""
        for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libGLX_nvidia.so.0"):
            key = len(strings)
            strings += f"{name}\0/var/lib/nvidia/lib64/{name}\0".encode()
            table += struct.pack(f"{order}iII", 3, key, key + len(name) + 1)
        old = b"ld.so-1.7.0\0" + struct.pack(f"{order}I", 3) + table + strings
        swapped = new[:20] + struct.pack(f"{order}I", count) + new[24:]
        for content in (old, swapped):
            tree.file("/etc/ld.so.cache", content)
            assert found(tree) == whole


def test_a_cache_without_the_driver_does_not_hide_it(tmp_path: Path) -> None:
    """B124: on a read-only system it may be older than the driver."""
    tree = build(tmp_path / "root", "talos")
    whole = found(tree)
    tree.cache(("libc.so.6", "/usr/lib/libc.so.6", "x86-64"))
    assert found(tree) == whole


def test_directories_of_the_loader_s_files_are_searched(tmp_path: Path) -> None:
    """With comments, types, includes that include themselves, and what is not there."""
    tree = Tree(tmp_path / "root")
    tree.libraries("/srv/nvidia/lib", COMPUTE_ONLY)
    tree.file("/etc/ld.so.conf", "\n# nothing\ninclude ld.so.conf.d/*.conf\nhwcap 0 nosegneg\n")
    tree.file("/etc/ld.so.conf.d/a.conf", "include /etc/ld.so.conf\n/gone\nrelative/lib\n")
    tree.file("/etc/ld.so.conf.d/b.conf", "/srv/nvidia/lib/=libc6  # ours\n")
    tree.file("/etc/ld.so.conf.d/c.other", "/gone\n")
    tree.directory("/etc/ld.so.conf.d/d.conf")
    assert {os.path.dirname(lib.container_path) for lib in found(tree).libraries} == {
        "/srv/nvidia/lib"
    }


def test_search_paths_are_in_place_of_the_usual_directories(tmp_path: Path) -> None:
    """B099, B071: outside the root the container path is the host's, below it that below it."""
    tree = build(tmp_path / "root", "rhel")
    tree.module(VERSION)
    outside = Tree(tmp_path / "snap")
    outside.libraries("/lib", COMPUTE_ONLY)
    outside.file("/share/vulkan/icd.d/nvidia_icd.json", "{}")
    outside.file("/share/glvnd/egl_vendor.d/10_nvidia.json", "{}")
    root = DriverRoot(str(tree.path))
    driver = find_driver(
        root,
        VERSION,
        library_search_path=[str(outside.at("/lib"))],
        config_search_path=[str(outside.at("/share"))],
        native="x86-64",
    )
    assert [lib.container_path for lib in driver.libraries] == [
        str(outside.at(f"/lib/{name}.so.{VERSION}")) for name in ("libcuda", "libnvidia-ml")
    ]
    assert all(lib.host_path == lib.container_path for lib in driver.libraries)
    configs = {f.container_path: f.host_path for f in driver.files if f.kind == "config"}
    egl, icd = (
        str(outside.at(f"/share/{name}"))
        for name in ("glvnd/egl_vendor.d/10_nvidia.json", "vulkan/icd.d/nvidia_icd.json")
    )
    assert configs == {
        "/etc/vulkan/icd.d/nvidia_icd.json": icd,
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json": egl,
    }
    inside = find_driver(
        root, VERSION, library_search_path=[f"{tree.path}/usr/lib64"], native="x86-64"
    )
    assert {os.path.dirname(lib.container_path) for lib in inside.libraries} == {
        "/usr/lib64",
        "/usr/lib64/vdpau",
    }
    assert (
        find_nvml(root, [str(outside.at("/lib"))], native="x86-64")
        == f"{outside.path}/lib/libnvidia-ml.so.{VERSION}"
    )


def test_reading_twice_gives_the_same(tmp_path: Path) -> None:
    """A spec may change only if the host does."""
    tree = build(tmp_path / "root", "debian")
    assert found(tree) == found(tree)
    assert repr(found(tree)) == repr(found(tree))
