# SPDX-License-Identifier: Apache-2.0
"""A node's driver below a directory, whose fake NVML is told what to report while it runs."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest
from simhost import artefacts, nvml_file

from gpunode.watch.supervision import Settings
from gpunode.watch.watcher import Watcher

VERSION = artefacts.DEFAULT_VERSION
GIB80 = 81559
# Polls follow each other quickly, and deadlines are short, so that tests do not wait.
QUICK = Settings(poll_s=0.05, first_deadline_s=10, deadline_s=0.5, restart_s=0.05, grace_s=1)


def uuid(gpu: int) -> str:
    """Return the UUID of GPU *gpu*."""
    return f"GPU-{gpu:x}f1e0000-9a3c-4d27-8b60-0c1d2e3f4a00"


def mig_uuid(gpu: int, index: int) -> str:
    """Return the UUID of a MIG device."""
    return f"MIG-{gpu:x}{index:x}7c0000-51d2-5e0b-9f14-0b2a3c4d5e0f"


def bus_id(gpu: int) -> str:
    """Return the PCI address of GPU *gpu* in sysfs."""
    return f"0000:{0x1A + gpu:02x}:00.0"


def gpu_lines(count: int, migs: Iterable[int] = ()) -> list[str]:
    """Return the lines of *count* GPUs, those of *migs* in MIG mode."""
    return [
        f"gpu {uuid(gpu)} {gpu} {bus_id(gpu)} {GIB80} {int(gpu in migs)} NVIDIA H100 80GB HBM3"
        for gpu in range(count)
    ]


class NodeHost:
    """The files of a driver and its kernel module with *count* GPUs, below *directory*."""

    def __init__(self, directory: Path, count: int = 2, migs: Iterable[int] = ()) -> None:
        self.root = directory / "root"
        self.lines = gpu_lines(count, migs)
        self.driver = VERSION
        shutil.copytree(artefacts.driver_tree(VERSION), self.root, symlinks=True)
        self._libraries = self.root / artefacts.LIBRARY_DIRECTORY
        self._file = nvml_file.NvmlFile(self._libraries / "fakenvml.conf")
        for gpu in range(count):
            self.make_node(f"nvidia{gpu}", gpu)
            device = self.root / "sys/bus/pci/devices" / bus_id(gpu)
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{gpu * 2 // count}\n")
        for minor, name in ((255, "nvidiactl"), (0, "nvidia-uvm")):
            self.make_node(name, minor)
        self.load_module()
        self.say()

    def make_node(self, name: str, minor: int) -> None:
        """Make a device node without a driver; skip the test where that is not allowed."""
        path = self.root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(195, minor))
        except PermissionError:
            pytest.skip("device nodes cannot be made here: needs root with CAP_MKNOD")
        path.chmod(0o666)

    def say(self, *lines: str) -> None:
        """Have NVML report the GPUs and *lines* from now on."""
        self._file.replace([f"driver {self.driver}", "cuda 12040", *self.lines, *lines])

    def load_module(self, version: str = VERSION) -> None:
        """Have the kernel show the module of *version*."""
        nvidia = self.root / "proc/driver/nvidia"
        nvidia.mkdir(parents=True, exist_ok=True)
        # Another load has another file.
        fresh = nvidia / ".version"
        fresh.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Fake\n")
        fresh.replace(nvidia / "version")
        module = self.root / "sys/module/nvidia"
        shutil.rmtree(module, ignore_errors=True)
        module.mkdir(parents=True)

    def unload_module(self) -> None:
        """Have the kernel show no module, and NVML no driver."""
        self.unload_module_files()
        self.say("unloaded")

    def unload_module_files(self) -> None:
        """Have the kernel show no module."""
        (self.root / "proc/driver/nvidia/version").unlink()
        shutil.rmtree(self.root / "sys/module/nvidia")

    def allow_mig(self, *instances: str) -> None:
        """Have the kernel list the capabilities of *instances*, `gpu0/gi1/ci0`, and nodes."""
        caps = self.root / "proc/driver/nvidia-caps"
        caps.mkdir(exist_ok=True)
        names = sorted(
            {name for instance in instances for name in (instance, instance.rpartition("/")[0])}
        )
        lines = [f"{name}/access {minor}\n" for minor, name in enumerate(names, 3)]
        (caps / "mig-minors").write_text("".join(lines))
        for minor, _ in enumerate(names, 3):
            if not (self.root / f"dev/nvidia-caps/nvidia-cap{minor}").exists():
                self.make_node(f"nvidia-caps/nvidia-cap{minor}", minor)

    def rename_libraries(self, old: str, new: str) -> None:
        """Replace the libraries of the driver *old* by those of *new*."""
        for path in sorted(self._libraries.glob(f"**/*.so.{old}")):
            path.rename(path.with_name(path.name.replace(old, new)))
        for link in sorted(self._libraries.glob("**/*")):
            if link.is_symlink() and old in os.readlink(link):
                target = os.readlink(link).replace(old, new)
                link.unlink()
                link.symlink_to(target)

    def remove_libraries(self) -> None:
        """Take the driver's user space away."""
        self._libraries.rename(self._libraries.with_name("removed"))

    def restore_libraries(self) -> None:
        """Bring the driver's user space back."""
        self._libraries.with_name("removed").rename(self._libraries)

    def watcher(self, settings: Settings = QUICK) -> Watcher:
        """Return a watcher of this host."""
        root = str(self.root)
        return Watcher(
            driver_root=root,
            dev_root=root,
            proc=f"{root}/proc",
            sys=f"{root}/sys",
            settings=settings,
        )
