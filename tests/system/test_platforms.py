# SPDX-License-Identifier: Apache-2.0
"""Containers on a WSL and on a Tegra, by runc with our runtime in its automatic mode."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platform_roots
import pytest
from containers import seen

pytestmark = pytest.mark.system("runc")

PROGRAM = seen.HERE / "platform_trees.py"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Yield the path of each miniature root."""
    base = tmp_path_factory.mktemp("roots")
    yield {
        "wsl": platform_roots.wsl(base / "wsl").path,
        "tegra": platform_roots.tegra(base / "tegra").path,
    }
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def found(roots: dict[str, Path]) -> dict[str, Any]:
    """Return what the containers saw."""
    words = [f"{name}={path}" for name, path in roots.items()]
    return seen.play("play", *words, program=PROGRAM)


STORE = platform_roots.STORE
TEGRA = platform_roots.TEGRA
# What a container of each platform has: nodes, symlinks, mounts, and the paths of the cache.
EXPECTED: dict[str, dict[str, set[str]]] = {
    "wsl": {
        "node": {"/dev/dxg"},
        "link": {
            f"/usr/bin/nvidia-smi ..{STORE[4:]}/nvidia-smi",
            f"{STORE}/libcuda.so libcuda.so.1",
            f"{STORE}/libcuda.so.1 libcuda.so.1.1",
        },
        "mount": {
            "/usr/lib/wsl/lib/libdxcore.so",
            *(f"{STORE}/{name}" for name in platform_roots.STORE_LIBRARIES),
            *(f"{STORE}/{name}" for name in ("nvcubins.bin", "nvidia-smi", "nvwgf2umx.dll")),
        },
        "cache": {
            "/usr/lib/wsl/lib/libdxcore.so",
            *(f"{STORE}/{name}" for name in platform_roots.STORE_LIBRARIES if name[-2:] != ".1"),
            *(f"{STORE}/{name}" for name in platform_roots.STORE_LIBRARIES.values()),
            f"{STORE}/libcuda.so",
        },
    },
    "tegra": {
        "node": {f"/dev/{name}" for name in platform_roots.NODES},
        "link": {
            "/usr/lib/firmware/tegra.fw tegra234/nvhost.fw",
            "/usr/lib/aarch64-linux-gnu/libcuda.so tegra/libcuda.so",
            f"{TEGRA}/libcuda.so libcuda.so.1",
            f"{TEGRA}/libcuda.so.1 libcuda.so.1.1",
        },
        "mount": {
            "/etc/nv_tegra_release",
            "/etc/vulkan/icd.d/nvidia_icd.json",
            "/usr/lib/firmware/tegra234/nvhost.fw",
            *(f"{TEGRA}/{name}" for name in ("libcuda.so.1.1", "libnvrm_gpu.so", "weston")),
        },
        "cache": {f"{TEGRA}/{name}" for name in ("libcuda.so", "libcuda.so.1", "libnvrm_gpu.so")},
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_container_has_what_its_platform_has(found: dict[str, Any], name: str) -> None:
    """Nothing is of the simulated driver that the machine has as well; all symlinks lead on."""
    container, plain = found[name], found["plain"]
    expected = EXPECTED[name]
    # A denied open is "Operation not permitted"; no driver has these numbers.
    assert set(container["node"]) == {f"{node} opened" for node in expected["node"]}
    assert set(container["link"]) == {f"{link} leads" for link in expected["link"]}
    assert set(container["mount"]) - set(plain["mount"]) == expected["mount"]
    assert {path for _, path in container["cache"]} - {path for _, path in plain["cache"]} == (
        expected["cache"]
    )
    assert set(container["env"]) - set(plain["env"]) == {"NVIDIA_VISIBLE_DEVICES=void"}
