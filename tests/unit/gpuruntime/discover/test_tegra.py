# SPDX-License-Identifier: Apache-2.0
"""The inventory of a miniature Jetson, by its CSV files, with and without an NVML."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import platform_roots
import pytest
from driver_roots import Tree, elf
from platform_roots import CSV, TEGRA

from gpuruntime import probes
from gpuruntime.discover import csv_files, fingerprint, inventory
from gpuruntime.discover.tegra import CsvOptions
from gpuruntime.errors import DiscoveryError
from gpuruntime.model import ALL_CSV, Inventory
from gpuruntime.plan import gpu_edits
from gpuruntime.snapshots import inventory_json


@pytest.fixture(autouse=True)
def without_leftovers(tmp_path: Path) -> Iterator[None]:
    """Remove the device nodes of the test."""
    yield
    shutil.rmtree(tmp_path)


ORIN = (
    "gpu 0a1b2c3d-0000-4000-8000-000000000001 0 0:0:0 1 0 Orin (nvgpu)",
    "fault nobusid 0",
    "fault fails nvmlDeviceGetMinorNumber 3 0",
)
THOR = ("gpu 0a1b2c3d-0000-4000-8000-000000000001 0 0:1:0 1 0 NVIDIA Thor",)
DISCRETE = "gpu GPU-5f1e0001-9a3c-4d27-8b60-0c1d2e3f4a01 1 5:1:0 48000 0 NVIDIA RTX 6000"


def discover(tree: Tree, *, mode: str = "auto", **options: object) -> Inventory:
    """Discover *tree* with *options* for its CSV files."""
    csv = CsvOptions(**options)  # type: ignore[arg-type]
    return inventory.discover(str(tree.path), str(tree.path), mode=mode, csv=csv)


def nodes(result: Inventory, gpu: int = 0) -> set[str]:
    """Return the names in /dev of the nodes of a GPU."""
    item = result.gpus[gpu]
    return {node.container_path[len("/dev/") :] for node in (item.node, *item.others)}


def mounts(result: Inventory) -> dict[str, str]:
    """Return container path → host path below the root."""
    items = (*result.driver.libraries, *result.driver.files)
    return {item.container_path: item.host_path for item in items}


def links(result: Inventory) -> set[str]:
    """Return the links of all files."""
    return {
        link for item in (*result.driver.libraries, *result.driver.files) for link in item.links
    }


@pytest.mark.parametrize("mode", ["auto", "csv"])
def test_a_jetson_without_nvml_is_one_device(tmp_path: Path, mode: str) -> None:
    """B050: all of its nodes; what the board lacks is a sentence with the line."""
    result = discover(platform_roots.tegra(tmp_path), mode=mode)
    (gpu,) = result.gpus
    assert (gpu.gpu.index, gpu.gpu.uuid) == (0, "")
    assert nodes(result) == set(platform_roots.NODES)
    assert result.driver.problems == (
        f'"{tmp_path}{CSV}/devices.csv" line 4: no device node "/dev/nvidiactl"',
    )
    assert "the platform is Tegra" in result.decision
    assert inventory_json.decode(inventory_json.encode(result)) == result


def test_entries_are_mounted_and_linked(tmp_path: Path) -> None:
    """A library by its real path, a symlink by its target and each link on the way."""
    result = discover(platform_roots.tegra(tmp_path))
    base = {
        item.container_path
        for item in (*result.driver.libraries, *result.driver.files)
        if not item.capability
    }
    assert base == {
        "/etc/nv_tegra_release",
        "/etc/vulkan/icd.d/nvidia_icd.json",
        "/usr/lib/firmware/tegra234/nvhost.fw",
        *(f"{TEGRA}/{name}" for name in ("libcuda.so.1.1", "libnvrm_gpu.so", "weston")),
    }
    assert all(host == f"{tmp_path}{path}" for path, host in mounts(result).items())
    assert links(result) == {
        "tegra/libcuda.so::/usr/lib/aarch64-linux-gnu/libcuda.so",
        f"libcuda.so.1::{TEGRA}/libcuda.so",
        f"libcuda.so.1.1::{TEGRA}/libcuda.so.1",
        "tegra234/nvhost.fw::/usr/lib/firmware/tegra.fw",
    }


def test_a_mounted_directory_has_its_own_symlinks(tmp_path: Path) -> None:
    """No link is made in it or at its place: it is read-only, and a container would not start."""
    tree = platform_roots.tegra(tmp_path)
    for name, soname in (("libone.so.1.5", "libone.so.1"), ("libtwo.so.1.5", "libtwo.so.1")):
        tree.file(f"{TEGRA}/weston/{name}", elf(soname, (), "aarch64"))
    tree.link(f"{TEGRA}/weston/libone.so.1", "libone.so.1.5")
    tree.link(f"{TEGRA}/weston/libone.so", f"{TEGRA}/weston/libone.so.1")
    tree.link(f"{TEGRA}/weston/absolute.so", f"{TEGRA}/weston/libone.so")
    tree.link(f"{TEGRA}/place", "weston")
    tree.file(
        f"{CSV}/drivers.csv",
        f"lib, {TEGRA}/weston/lib*.so.*\nsym, {TEGRA}/weston/absolute.so\nsym, {TEGRA}/place\n"
        f"sym, {TEGRA}/libcuda.so\ndir, {TEGRA}/place\ndir, {TEGRA}/weston\n",
    )
    result = discover(tree)
    assert result.driver.problems == (
        f'"{tmp_path}{CSV}/devices.csv" line 4: no device node "/dev/nvidiactl"',
    )
    assert {f"{TEGRA}/weston", f"{TEGRA}/place"} <= set(mounts(result))
    assert set(gpu_edits.links(result.driver)) == {
        # The same as the directory has; the loader cache names the library by it.
        f"libone.so.1.5::{TEGRA}/weston/libone.so.1",
        f"libcuda.so.1::{TEGRA}/libcuda.so",
        f"libcuda.so.1.1::{TEGRA}/libcuda.so.1",
        "tegra234/nvhost.fw::/usr/lib/firmware/tegra.fw",
    }


def test_other_csv_files_are_for_containers_that_ask(tmp_path: Path) -> None:
    """B050: those of CUDA, which NVIDIA_REQUIRE_JETPACK=csv-mounts=all brings back."""
    result = discover(platform_roots.tegra(tmp_path))
    items = (*result.driver.libraries, *result.driver.files)
    assert {item.container_path for item in items if item.capability == ALL_CSV} == {
        "/usr/local/cuda",
        "/usr/lib/aarch64-linux-gnu/libcudnn.so.9",
    }


def test_named_csv_files_replace_the_usual_ones(tmp_path: Path) -> None:
    """Every container gets their entries."""
    tree = platform_roots.tegra(tmp_path)
    tree.file("/opt/own.csv", "dev, /dev/nvmap\ndir, /usr/local/cuda\n")
    result = discover(tree, files=[f"{tmp_path}/opt/own.csv"])
    assert nodes(result) == {"nvmap"}
    assert set(mounts(result)) == {"/usr/local/cuda", "/etc/nv_tegra_release"}
    assert not any(item.capability for item in result.driver.files)


def test_a_csv_file_of_windows_is_read(tmp_path: Path) -> None:
    """It begins with a byte order mark, and its lines end with a carriage return."""
    tree = platform_roots.tegra(tmp_path)
    tree.file(f"{CSV}/devices.csv", "\ufeffdev, /dev/nvmap\r\ndev, /dev/nvhost-ctrl\r\n")
    result = discover(tree)
    assert nodes(result) == {"nvmap", "nvhost-ctrl"}
    assert result.driver.problems == ()


@pytest.mark.parametrize(
    ("pattern", "is_ignored"),
    [
        ("/usr/lib/aarch64-linux-gnu/libcuda.so", True),
        ("/usr/lib/*/libcuda.so", True),
        ("**/libcuda.so*", True),
        ("libcuda.so", False),
        ("**/libcuda.so.1", False),
    ],
)
def test_ignore_patterns_are_of_symlinks(
    tmp_path: Path, pattern: str, *, is_ignored: bool
) -> None:
    """Of the whole path, or of the name after `**/`; libraries stay."""
    result = discover(platform_roots.tegra(tmp_path), ignore_patterns=[pattern])
    link = "tegra/libcuda.so::/usr/lib/aarch64-linux-gnu/libcuda.so"
    assert (link not in links(result)) == is_ignored
    assert f"{TEGRA}/libcuda.so.1.1" in mounts(result)


def test_a_library_without_a_directory_is_searched(tmp_path: Path) -> None:
    """In the directories of --library-search-path."""
    tree = platform_roots.tegra(tmp_path)
    tree.file("/opt/lib/libown.so.1", elf("libown.so.1", (), "aarch64"))
    tree.file(f"{CSV}/drivers.csv", "lib, libown.so.*\nlib, libmissing.so\n")
    result = discover(tree, library_search_path=[f"{tmp_path}/opt/lib"])
    assert "/opt/lib/libown.so.1" in mounts(result)
    assert any('line 2: "libmissing.so" does not exist' in p for p in result.driver.problems)


def test_an_integrated_gpu_with_nvml_has_its_version(tmp_path: Path) -> None:
    """One device; CUDA's version decides which CUDA of an image is used."""
    result = discover(platform_roots.tegra(tmp_path, *ORIN))
    (gpu,) = result.gpus
    assert (gpu.gpu.uuid, gpu.gpu.name) == ("", "Orin (nvgpu)")
    assert (result.driver.version, result.cuda_version) == ("540.4.0", "12.6")
    assert result.decision == 'the platform is Tegra: NVML lists the GPU "Orin (nvgpu)"'


@pytest.mark.parametrize("integrated", [ORIN, THOR])
def test_a_discrete_gpu_beside_has_its_own_device(
    tmp_path: Path, integrated: tuple[str, ...]
) -> None:
    """Each with its own node, and both with those of the board."""
    tree = platform_roots.tegra(tmp_path, integrated[0], DISCRETE, *integrated[1:])
    tree.file(
        f"{CSV}/devices.csv", "dev, /dev/nvmap\ndev, /dev/nvidia*\ndev, /dev/nvidia-modeset\n"
    )
    platform_roots.node(
        tmp_path, "nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-modeset"
    )
    result = discover(tree)
    assert [item.gpu.index for item in result.gpus] == [0, 1]
    control = {"nvidiactl", "nvidia-uvm", "nvidia-modeset"}
    assert nodes(result) == {"nvmap", "nvidia0", "nvidia2", *control}
    assert nodes(result, 1) == {"nvmap", "nvidia1", *control}
    assert "beside 1 other GPU" in result.decision
    assert discover(tree, single_device=True).gpus[0].gpu.uuid == ""


def test_an_unusual_pair_of_gpus_is_one_device(tmp_path: Path) -> None:
    """The integrated GPU has to be the first: if not, a sentence, and the CSV files alone."""
    discrete = DISCRETE.replace(" 1 5:1", " 0 5:1")
    integrated = THOR[0].replace(" 0 0:1", " 1 0:1")
    result = discover(platform_roots.tegra(tmp_path, discrete, integrated))
    assert nodes(result) == set(platform_roots.NODES)
    (problem,) = result.problems
    assert problem.startswith("all GPUs are one device: GPU 0, NVIDIA RTX 6000, is discrete")


def test_an_nvml_that_fails_leaves_the_csv_files(tmp_path: Path) -> None:
    """With a sentence."""
    result = discover(platform_roots.tegra(tmp_path, "fault init-fails 9"))
    assert nodes(result) == set(platform_roots.NODES)
    (problem,) = result.problems
    assert problem.startswith("NVML is not used: ")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("dev", '"dev" is not of the form TYPE, PATH'),
        ("node, /dev/x", 'the type "node" is none of dev, dir, lib, sym'),
        ("lib,", "there is no path"),
        ("dir, usr/lib", '"usr/lib" is not an absolute path'),
        ("sym, libfoo.so", '"libfoo.so" is not an absolute path'),
        ("dev, /dev/missing", 'no device node "/dev/missing"'),
        ("dev, /etc/nv_tegra_release", 'no device node "/etc/nv_tegra_release"'),
        ("lib, /missing.so", '"/missing.so" does not exist'),
        ("lib, /broken.so", "is not a usable library"),
        ("lib, /usr", "is a directory"),
        ("dir, /", "the root directory cannot be mounted"),
        ("dir, /etc/nv_tegra_release", "is not a directory"),
        ("sym, /loop", "leads to itself"),
        ("sym, /dangling", "does not exist"),
        ("sym, /outside", "does not exist"),
        ("lib, /open.so", "users other than root can change it"),
        ("lib, /a b.so", "cannot be named in a"),
        ("dir, /many/*", "has over 4096 matches"),
        ("dev, /many/*", "has over 4096 matches"),
        ("lib, /\udcff.so", "does not exist"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, told: str) -> None:
    """By file and number; the other lines count."""
    tree = platform_roots.tegra(tmp_path)
    tree.file("/broken.so", "MZ")
    tree.file("/open.so", elf("open.so", (), "aarch64")).chmod(0o666)
    tree.file("/a b.so", elf("a.so", (), "aarch64"))
    tree.link("/loop", "loop")
    tree.link("/dangling", "nowhere")
    tree.link("/outside", "../../../../../../etc/passwd")
    if "many" in line:
        for number in range(4097):
            tree.file(f"/many/{number}")
    text = f"# a comment\n\n{line}\nlib, {TEGRA}/libcuda.so.1.1\n"
    tree.file(f"{CSV}/drivers.csv", text.encode("utf-8", "surrogateescape"))
    result = discover(tree)
    assert f"{TEGRA}/libcuda.so.1.1" in mounts(result)
    problems = [text for text in result.driver.problems if "drivers.csv" in text]
    assert len(problems) == 1
    assert problems[0].startswith(f'"{tmp_path}{CSV}/drivers.csv" line 3: ')
    assert told in problems[0]


def test_many_faulty_lines_are_counted(tmp_path: Path) -> None:
    """A Jetson's files may list hundreds of nodes that a board lacks."""
    tree = platform_roots.tegra(tmp_path)
    tree.file(f"{CSV}/l4t.csv", "".join(f"lib, /missing{i}.so\n" for i in range(500)))
    problems = discover(tree).driver.problems
    assert len(problems) == csv_files.MAX_SENTENCES + 1
    assert problems[-1] == "485 more lines of the CSV files are left out"


def huge(path: Path) -> None:
    """Make it 100 MB."""
    os.truncate(path, 100 << 20)


def looping(path: Path) -> None:
    """Make it a symlink to itself."""
    path.unlink()
    path.symlink_to(path.name)


def fifo(path: Path) -> None:
    """Make it a FIFO, which blocks a reader."""
    path.unlink()
    os.mkfifo(path)


def empty(path: Path) -> None:
    """Make it empty."""
    path.write_bytes(b"")


def binary(path: Path) -> None:
    """Fill it with every byte."""
    path.write_bytes(bytes(range(256)) * 64)


def writable(path: Path) -> None:
    """Let any user change it."""
    path.chmod(0o666)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (huge, "File too large"),
        (looping, "Too many levels of symbolic links"),
        (fifo, "is a FIFO"),
        (empty, "has no entry"),
        (binary, "is not a text file"),
        (writable, "users other than root can change it"),
    ],
)
def test_a_csv_file_that_cannot_be_used(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    """One is a sentence; all of them are an error, as nothing is left to give."""
    tree = platform_roots.tegra(tmp_path)
    tree.at(f"{CSV}/cuda.csv").unlink()
    damage(tree.at(f"{CSV}/l4t.csv"))
    assert any("l4t.csv" in text and told in text for text in discover(tree).driver.problems)
    for name in ("devices.csv", "drivers.csv"):
        damage(tree.at(f"{CSV}/{name}"))
    with pytest.raises(DiscoveryError, match="no CSV file can be used") as caught:
        discover(tree)
    assert told in caught.value.message
    assert "\n" not in caught.value.message


def test_a_machine_without_the_nodes_is_an_error(tmp_path: Path) -> None:
    """The files of another board."""
    tree = platform_roots.tegra(tmp_path)
    tree.file(f"{CSV}/devices.csv", "dev, /dev/nvhost-vic-other\n")
    with pytest.raises(DiscoveryError, match="no device node of the CSV files exists"):
        discover(tree)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda tree: tree.file(f"{CSV}/l4t.csv", "dev, /dev/x\n"), "CSV files"),
        (lambda tree: tree.file(f"{CSV}/new.csv", "dev, /dev/x\n"), "CSV files"),
        (lambda tree: tree.at(f"{TEGRA}/libcuda.so").unlink(), "directories of CSV entries"),
        (lambda tree: tree.at("/dev/nvmap").chmod(0o600), "nodes of CSV entries"),
    ],
)
def test_a_change_invalidates_what_is_saved(
    tmp_path: Path, change: Callable[[Tree], object], part: str
) -> None:
    """Of the CSV files, of what they list, and of the nodes."""
    tree = platform_roots.tegra(tmp_path)
    state = probes.read(fingerprint.plan(str(tmp_path), str(tmp_path)))
    assert probes.changed(state) == []
    change(tree)
    assert part in probes.changed(state)
