# SPDX-License-Identifier: Apache-2.0
"""The inventory of a miniature WSL, whose libdxcore is a fake."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import platform_roots
import pytest
from driver_roots import Tree, elf
from platform_roots import INTEL, LEFT_OVER, STORE

from gpuruntime import probes
from gpuruntime.discover import fingerprint, inventory
from gpuruntime.errors import DiscoveryError, DriverError, GpuRuntimeError
from gpuruntime.model import Inventory
from gpuruntime.snapshots import inventory_json


@pytest.fixture(autouse=True)
def without_leftovers(tmp_path: Path) -> Iterator[None]:
    """Remove the device nodes of the test."""
    yield
    shutil.rmtree(tmp_path)


def discover(tree: Tree, *, mode: str = "auto", deadline_s: float = 30.0) -> Inventory:
    """Discover *tree*."""
    return inventory.discover(str(tree.path), str(tree.path), mode=mode, deadline_s=deadline_s)


def paths(result: Inventory) -> list[str]:
    """Return the container paths of the driver's files."""
    return [item.container_path for item in (*result.driver.libraries, *result.driver.files)]


@pytest.mark.parametrize("mode", ["auto", "wsl"])
def test_the_store_of_the_adapter_is_mounted(tmp_path: Path, mode: str) -> None:
    """B101: at its own path, with libdxcore, and nothing but the driver's kinds of files."""
    tree = platform_roots.wsl(tmp_path)
    platform_roots.store(tree, LEFT_OVER)
    result = discover(tree, mode=mode)
    expected = [*platform_roots.STORE_LIBRARIES, "nvcubins.bin", "nvidia-smi", "nvwgf2umx.dll"]
    assert sorted(paths(result)) == sorted(
        ["/usr/lib/wsl/lib/libdxcore.so", *(f"{STORE}/{name}" for name in expected)]
    )
    (gpu,) = result.gpus
    assert gpu.node.container_path == "/dev/dxg"
    assert (result.control_nodes, result.problems, result.driver.problems) == ((), (), ())
    assert inventory_json.decode(inventory_json.encode(result)) == result


def test_the_store_is_below_the_driver_root(tmp_path: Path) -> None:
    """The path that libdxcore reports is one in WSL, whose root may be mounted elsewhere."""
    result = discover(platform_roots.wsl(tmp_path, f"adapter {STORE}"))
    library = next(item for item in result.driver.libraries if "libcuda.so" in item.host_path)
    assert library.host_path == f"{tmp_path}{library.container_path}"


def test_libcuda_comes_before_its_loader(tmp_path: Path) -> None:
    """Both have one SONAME, which the loader must find in libcuda itself."""
    result = discover(platform_roots.wsl(tmp_path))
    sonames = {
        item.container_path.rpartition("/")[2]: (item.soname, item.dev_link)
        for item in result.driver.libraries
    }
    assert sonames["libcuda.so.1.1"] == ("libcuda.so.1", "libcuda.so")
    assert sonames["libcuda_loader.so"] == ("libcuda_loader.so", "")


@pytest.mark.parametrize("old", [False, True])
def test_adapters_of_others_are_skipped(tmp_path: Path, old: bool) -> None:
    """B101: an older libdxcore lists adapters by another function."""
    tree = platform_roots.wsl(
        tmp_path,
        f"adapter {tmp_path}{INTEL}",
        "adapter -",
        f"adapter {tmp_path}/usr/lib/wsl/drivers/missing",
        f"adapter {tmp_path}{STORE}",
        f"adapter {tmp_path}{STORE}",
        old=old,
    )
    tree.file(f"{INTEL}/libze_intel_gpu.so.1", elf("libze_intel_gpu.so.1"))
    result = discover(tree)
    assert f"{STORE}/libcuda.so.1.1" in paths(result)
    assert not any(path.startswith(INTEL) for path in paths(result))
    assert result.problems == ()


def test_a_second_store_of_nvidia_is_named(tmp_path: Path) -> None:
    """The first one serves all adapters, as with the incumbent."""
    tree = platform_roots.wsl(
        tmp_path, f"adapter {tmp_path}{STORE}", f"adapter {tmp_path}{LEFT_OVER}"
    )
    platform_roots.store(tree, LEFT_OVER)
    result = discover(tree)
    assert not any(path.startswith(LEFT_OVER) for path in paths(result))
    (problem,) = result.problems
    assert LEFT_OVER in problem


def no_adapter(tree: Tree) -> None:
    """Have no adapter."""
    platform_roots.say(tree, "")


def other_adapter(tree: Tree) -> None:
    """Have an adapter of another vendor."""
    tree.file(f"{INTEL}/libze_intel_gpu.so.1", elf("libze_intel_gpu.so.1"))
    platform_roots.say(tree, f"adapter {tree.path}{INTEL}")


def looping_store(tree: Tree) -> None:
    """Have a driver store that is a symlink to itself."""
    tree.link("/usr/lib/wsl/drivers/loop", "loop")
    platform_roots.say(tree, f"adapter {tree.path}/usr/lib/wsl/drivers/loop")


def without_cuda(tree: Tree) -> None:
    """Take libcuda away."""
    tree.at(f"{STORE}/libcuda.so.1.1").unlink()


def without_nvml(tree: Tree) -> None:
    """Take NVML away."""
    tree.at(f"{STORE}/libnvidia-ml.so.1").unlink()


def broken_cuda(tree: Tree) -> None:
    """Put a program of Windows in place of libcuda."""
    tree.file(f"{STORE}/libcuda.so.1.1", "MZ")


def foreign_cuda(tree: Tree) -> None:
    """Put the libcuda of another machine in its place."""
    tree.file(f"{STORE}/libcuda.so.1.1", elf("libcuda.so.1", (), "i386"))


def empty_dxcore(tree: Tree) -> None:
    """Make libdxcore empty."""
    tree.file("/usr/lib/wsl/lib/libdxcore.so")


def other_dxcore(tree: Tree) -> None:
    """Make libdxcore a library without functions."""
    tree.file("/usr/lib/wsl/lib/libdxcore.so", elf("libdxcore.so"))


def dxg_is_a_file(tree: Tree) -> None:
    """Put a file in place of the node."""
    tree.at("/dev/dxg").unlink()
    tree.file("/dev/dxg")


def without_dxg(tree: Tree) -> None:
    """Take the node away."""
    tree.at("/dev/dxg").unlink()


def refused_enum(tree: Tree) -> None:
    """Refuse to list adapters."""
    platform_roots.say(tree, "fault enum 0xC0000001")


def refused_query(tree: Tree) -> None:
    """Refuse to name the driver store."""
    platform_roots.say(tree, f"adapter {tree.path}{STORE}", "fault query 0xC0000001")


def crash(tree: Tree) -> None:
    """End the process that asks."""
    platform_roots.say(tree, "fault crashes")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (no_adapter, DiscoveryError, "WSL has no adapter with a driver store"),
        (
            other_adapter,
            DiscoveryError,
            'no "libcuda.so.1.1" in the driver stores of its adapters',
        ),
        (looping_store, DiscoveryError, "WSL has no NVIDIA adapter"),
        (without_cuda, DiscoveryError, "WSL has no NVIDIA adapter"),
        (without_nvml, DiscoveryError, 'no "libnvidia-ml.so.1" in the driver store'),
        (broken_cuda, DiscoveryError, "libcuda.so.1.1"),
        (foreign_cuda, DiscoveryError, "is for i386, not for "),
        (empty_dxcore, DriverError, "libdxcore.so"),
        (other_dxcore, DriverError, "libdxcore.so"),
        (dxg_is_a_file, DriverError, "is not a character device"),
        (without_dxg, DriverError, 'no device node "/dev/dxg"'),
        (refused_enum, DriverError, "D3DKMTEnumAdapters3 returned 0xc0000001"),
        (refused_query, DiscoveryError, "WSL has no adapter with a driver store"),
        (crash, DriverError, "ended the process that asked it, signal 6"),
    ],
)
def test_each_fault_is_a_line(
    tmp_path: Path, fault: object, kind: type[GpuRuntimeError], message: str
) -> None:
    """B024: each cause has its own message, and an action."""
    tree = platform_roots.wsl(tmp_path)
    fault(tree)  # type: ignore[operator]
    with pytest.raises(kind) as caught:
        discover(tree, mode="wsl")
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_libdxcore_that_hangs_is_abandoned(tmp_path: Path) -> None:
    """The deadline is that of the discovery."""
    tree = platform_roots.wsl(tmp_path, "fault hangs")
    with pytest.raises(DriverError, match=r"did not answer in 0\.3 s"):
        discover(tree, deadline_s=0.3)


def test_what_the_store_lacks_is_said(tmp_path: Path) -> None:
    """A file that CUDA can do without is a sentence; so is a broken library."""
    tree = platform_roots.wsl(tmp_path)
    tree.at(f"{STORE}/nvidia-smi").unlink()
    tree.file(f"{STORE}/libnvcuvid.so.1", "MZ")
    os.chmod(tree.at(f"{STORE}/nvcubins.bin"), 0o666)
    problems = " ".join(discover(tree).driver.problems)
    assert 'no "nvidia-smi" in the driver store' in problems
    assert "libnvcuvid.so.1" in problems
    assert "users other than root can change it" in problems


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (without_dxg, "node of WSL"),
        (without_nvml, "files of WSL"),
        (empty_dxcore, "files of WSL"),
        (lambda tree: platform_roots.store(tree, LEFT_OVER), "files of WSL"),
    ],
)
def test_a_change_invalidates_what_is_saved(
    tmp_path: Path, change: Callable[[Tree], object], part: str
) -> None:
    """A driver update on Windows replaces the driver store."""
    tree = platform_roots.wsl(tmp_path)
    state = probes.read(fingerprint.plan(str(tmp_path), str(tmp_path)))
    assert probes.changed(state) == []
    change(tree)
    assert part in probes.changed(state)
