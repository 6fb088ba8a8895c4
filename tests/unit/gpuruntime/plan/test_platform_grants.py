# SPDX-License-Identifier: Apache-2.0
"""What a container gets from the inventory of WSL or a Tegra: without a file, without a driver."""

from __future__ import annotations

from typing import Any

import pytest

from gpuruntime.config import Config
from gpuruntime.errors import UnresolvedDeviceError
from gpuruntime.model import ALL_CSV, CSV, WSL, Driver, File, Gpu, GpuNodes, Inventory, Node
from gpuruntime.plan import from_inventory
from gpuruntime.request.driver_options import DriverOptions
from gpuruntime.request.parse import Request

ORIN_ROOT = "nvidia-container-runtime.modes.csv.compat-container-root"


def node(name: str) -> Node:
    """Return a node of the host's own /dev."""
    return Node(host_path=f"/dev/{name}", container_path=f"/dev/{name}")


def file(path: str, capability: str = "") -> File:
    """Return a file that has the same path on the host."""
    return File(kind="config", host_path=path, container_path=path, capability=capability)


def machine(platform: str, name: str, *files: File) -> Inventory:
    """Return a machine of *platform* with one GPU, whose nodes are "one" and "two"."""
    gpu = Gpu(index=0, uuid="", minor=0, name=name)
    return Inventory(
        driver=Driver(version="", libraries=(), files=files, platform=platform),
        gpus=(GpuNodes(gpu=gpu, node=node("one"), others=(node("two"),)),),
        control_nodes=(),
        cuda_version="12.6",
        decision="the platform is chosen",
    )


def granted(
    inventory: Inventory, *ids: str, all_csv: bool = False, **config: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the edits and notes for a container that requests *ids*."""
    settings = Config({key.replace("__", "."): value for key, value in config.items()}, None)
    request = Request(
        "jit-cdi",
        "variable",
        tuple(f"runtime.nvidia.com/gpu={name}" for name in ids),
        DriverOptions(("compute",), all_csv=all_csv),
        driver_only=not ids,
    )
    style = from_inventory.style(settings, "/usr/bin/gpu-cdi-hook")
    grant = from_inventory.grant(request, inventory, settings, style)
    return dict(grant.edits), list(grant.notes)


def paths(edits: dict[str, Any], member: str, key: str) -> list[str]:
    """Return a path of each item of a member."""
    return [item[key] for item in edits.get(member) or ()]


@pytest.mark.parametrize("name", ["all", "0", "1", "GPU-5f1e0001"])
def test_any_gpu_of_wsl_is_all_of_them(name: str) -> None:
    """With a note, and without control nodes, which WSL does not have."""
    edits, notes = granted(machine(WSL, ""), name)
    assert paths(edits, "deviceNodes", "path") == ["/dev/one", "/dev/two"]
    assert "the platform is chosen" in notes
    assert any(f"{name} gets all of them" in text for text in notes) == (name != "all")


def test_none_of_wsl_is_the_driver_alone() -> None:
    """`none` is not all of them."""
    edits, _ = granted(machine(WSL, "", file("/usr/lib/wsl/a.bin")))
    assert paths(edits, "deviceNodes", "path") == []
    assert paths(edits, "mounts", "hostPath") == ["/usr/lib/wsl/a.bin"]


def test_a_tegra_has_its_own_indices() -> None:
    """A device that does not exist is an error, as on every other machine."""
    edits, _ = granted(machine(CSV, "Tegra"), "0")
    assert paths(edits, "deviceNodes", "path") == ["/dev/one", "/dev/two"]
    with pytest.raises(UnresolvedDeviceError, match='no device "1"'):
        granted(machine(CSV, "Tegra"), "1")


@pytest.mark.parametrize("all_csv", [False, True])
def test_files_of_other_csv_files_are_on_request(*, all_csv: bool) -> None:
    """B050: NVIDIA_REQUIRE_JETPACK=csv-mounts=all asks for them; no capability does."""
    inventory = machine(CSV, "Tegra", file("/usr/a"), file("/usr/local/cuda", ALL_CSV))
    edits, notes = granted(inventory, "all", all_csv=all_csv)
    expected = ["/usr/a", "/usr/local/cuda"] if all_csv else ["/usr/a"]
    assert sorted(paths(edits, "mounts", "hostPath")) == expected
    assert not any(ALL_CSV in text for text in notes)


@pytest.mark.parametrize(
    ("name", "root", "words"),
    [
        ("Tegra", "", []),
        ("NVIDIA Thor", "/opt/compat", []),
        ("Orin (nvgpu)", "", ["--cuda-compat-root", "/usr/local/cuda/compat_orin"]),
        ("Orin (nvgpu)", "/opt/compat", ["--cuda-compat-root", "/opt/compat"]),
    ],
)
def test_cuda_of_an_image_is_chosen_by_the_cuda_version(
    name: str, root: str, words: list[str]
) -> None:
    """In a directory of its own for Orin; no other step of the hook has an effect there."""
    edits, _ = granted(machine(CSV, name), "all", **{ORIN_ROOT.replace(".", "__"): root})
    (hook,) = edits["hooks"]
    assert hook["args"][1:] == ["update-container", "--cuda-compat-cuda", "12.6", *words]
