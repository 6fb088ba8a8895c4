# SPDX-License-Identifier: Apache-2.0
"""Miniature roots of the platforms that are not Linux with NVML: WSL and Tegra.

Each has its dev root below the same directory. Device nodes need root with CAP_MKNOD.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
from pathlib import Path

import pytest
from driver_roots import Tree, elf
from simhost import artefacts

STORE = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_0a1b2c3d4e5f6071"
LEFT_OVER = "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_ffffffffffffffff"
INTEL = "/usr/lib/wsl/drivers/iigd_dch.inf_amd64_1111111111111111"
# Name in the driver store → its SONAME. Both files of libcuda have the same one.
STORE_LIBRARIES = {
    "libcuda.so.1.1": "libcuda.so.1",
    "libcuda_loader.so": "libcuda.so.1",
    "libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml.so.1": "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so": "libnvidia-ml.so.1",
    "libnvdxgdmal.so.1": "libnvdxgdmal.so.1",
    "libnvcuvid.so.1": "libnvcuvid.so.1",
}
STORE_FILES = ("nvcubins.bin", "nvwgf2umx.dll", "readme.txt")
CSV = "/etc/nvidia-container-runtime/host-files-for-container.d"
TEGRA = "/usr/lib/aarch64-linux-gnu/tegra"
# As JetPack has them, with one entry of each kind that its files have.
CSV_FILES = {
    "devices.csv": "dev, /dev/nvhost-ctrl\ndev, /dev/nvmap\ndev, /dev/nvgpu/igpu0/*\n"
    "dev, /dev/nvidiactl\n",
    "drivers.csv": f"lib, {TEGRA}/libcuda.so.1.1\nsym, /usr/lib/aarch64-linux-gnu/libcuda.so\n",
    "l4t.csv": "# configuration\n\n"
    f"lib, {TEGRA}/libnvrm_gpu.so\n"
    "lib, /etc/vulkan/icd.d/nvidia_icd.json\n"
    f"dir, {TEGRA}/weston\n"
    "sym, /usr/lib/firmware/tegra.fw\n",
    "cuda.csv": "dir, /usr/local/cuda\nlib, /usr/lib/aarch64-linux-gnu/libcudnn.so.9\n",
}
NODES = ("nvhost-ctrl", "nvmap", "nvgpu/igpu0/as", "nvgpu/igpu0/ctrl")


def native() -> str:
    """Return the ABI of this machine's libraries."""
    return {"aarch64": "aarch64"}.get(platform.machine(), "x86-64")


def node(root: Path, *names: str) -> None:
    """Make character devices below *root*/dev that no driver has."""
    for name in names:
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mknod(path, stat.S_IFCHR, os.makedev(195, 99))
        except PermissionError:
            pytest.skip("device nodes cannot be made here: needs root with CAP_MKNOD")
        path.chmod(0o666)


def wsl(path: Path, *lines: str, old: bool = False) -> Tree:
    """Make a WSL whose libdxcore answers with *lines*, by default one NVIDIA adapter."""
    tree = Tree(path)
    store(tree, STORE)
    library = tree.file("/usr/lib/wsl/lib/libdxcore.so")
    shutil.copyfile(artefacts.fake_dxcore(old=old), library)
    say(tree, *(lines or (f"adapter {path}{STORE}",)))
    node(path, "dxg")
    return tree


def say(tree: Tree, *lines: str) -> None:
    """Have the libdxcore of *tree* answer with *lines*."""
    tree.file("/usr/lib/wsl/lib/fakedxcore.conf", "".join(f"{line}\n" for line in lines))


def store(tree: Tree, directory: str) -> None:
    """Make a driver store of NVIDIA's."""
    for name, soname in STORE_LIBRARIES.items():
        tree.file(f"{directory}/{name}", elf(soname, ["libc.so.6"], native()))
    for name in STORE_FILES:
        tree.file(f"{directory}/{name}", "data")
    tree.file(f"{directory}/nvidia-smi", elf(None, (), native()), 0o755)


def tegra(path: Path, *gpus: str) -> Tree:
    """Make a Jetson; with *gpus*, lines for the fake NVML, it has NVML as well."""
    tree = Tree(path)
    tree.file("/etc/nv_tegra_release", "# R36 (release), REVISION: 4.0\n")
    for name, text in CSV_FILES.items():
        tree.file(f"{CSV}/{name}", text)
    tree.file(f"{TEGRA}/libcuda.so.1.1", elf("libcuda.so.1", (), "aarch64"))
    tree.link(f"{TEGRA}/libcuda.so.1", "libcuda.so.1.1")
    tree.link(f"{TEGRA}/libcuda.so", "libcuda.so.1")
    tree.link("/usr/lib/aarch64-linux-gnu/libcuda.so", "tegra/libcuda.so")
    tree.file(f"{TEGRA}/libnvrm_gpu.so", elf("libnvrm_gpu.so", (), "aarch64"))
    tree.file(f"{TEGRA}/weston/desktop-shell.so", elf(None, (), "aarch64"))
    tree.file("/etc/vulkan/icd.d/nvidia_icd.json", "{}")
    tree.file("/usr/lib/firmware/tegra234/nvhost.fw", "firmware")
    tree.link("/usr/lib/firmware/tegra.fw", "/usr/lib/firmware/tegra234/nvhost.fw")
    tree.file("/usr/local/cuda/version.json", "{}")
    tree.file("/usr/lib/aarch64-linux-gnu/libcudnn.so.9", elf("libcudnn.so.9", (), "aarch64"))
    node(path, *NODES)
    if gpus:
        nvml(tree, *gpus)
    return tree


def nvml(tree: Tree, *lines: str) -> None:
    """Give *tree* an NVML that answers with *lines*."""
    directory = f"/usr/lib/{artefacts.MULTIARCH}"
    library = tree.file(f"{directory}/libnvidia-ml.so.1")
    shutil.copyfile(artefacts.fake_nvml(), library)
    text = "\n".join(("driver 540.4.0", "cuda 12060", *lines, ""))
    tree.file(f"{directory}/fakenvml.conf", text)
