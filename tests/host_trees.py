# SPDX-License-Identifier: Apache-2.0
"""A host as a tree of plain files, of which the state is read: roots, /proc, /sys, /dev.

Two GPUs, the second in MIG mode; below a directory that anybody may have.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuruntime import probes
from gpuruntime.discover import fingerprint

LIBRARIES = "driver/usr/lib/x86_64-linux-gnu"
GPUS = ("0000:01:00.0", "0000:02:00.0")
MIG = "proc/driver/nvidia/capabilities/gpu1/mig"
FILES = {
    "proc/devices": "195 nvidia\n511 nvidia-uvm\n",
    "proc/driver/nvidia/version": "NVRM version: 1.2\n",
    **{f"proc/driver/nvidia/gpus/{bus}/information": f"Device Minor: {bus[6]}" for bus in GPUS},
    f"{MIG}/gi1/ci0/access": "DeviceFileMinor: 12\n",
    "proc/driver/nvidia-caps/mig-minors": "config 1\nmonitor 2\ngpu1/gi1/access 12\n",
    "sys/module/nvidia/version": "1.2",
    "sys/module/nvidia_uvm/version": "1.2",
    "sys/module/firmware_class/parameters/path": "\n",
    **{f"sys/bus/pci/devices/{bus}/drm/card{bus[6]}/dev": "" for bus in GPUS},
    "sys/bus/pci/drivers/nvidia/uevent": "",
    "sys/bus/pci/drivers/vfio-pci/uevent": "",
    "driver/etc/ld.so.cache": "",
    "driver/etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
    "driver/etc/ld.so.conf.d/usual.conf": "/usr/lib/x86_64-linux-gnu\n/opt/driver/lib\n",
    "driver/etc/passwd": "root:x:0:0\n",
    **{f"driver/{name}/other": "" for name in ("opt", "run", "tmp", "var/run")},
    "driver/usr/bin/nvidia-smi": "",
    "driver/usr/share/vulkan/icd.d/other.json": "",
    "driver/lib/firmware/nvidia/1.2/gsp.bin": "",
    f"{LIBRARIES}/libcuda.so.1.2": "x",
    f"{LIBRARIES}/libnvidia-ml.so.1.2": "x",
    "dev/dev/nvidia0": "",
    "dev/dev/nvidia1": "",
    "dev/dev/nvidiactl": "",
    "dev/dev/nvidia-caps/nvidia-cap1": "",
    "dev/dev/dri/card0": "",
    "dev/dev/dri/card1": "",
    "dev/dev/sda": "",
    "etc/gpuruntime/config.toml": "x = 1\n",
    "specs/vendor.json": "{}",
}
LINKS = {
    f"{LIBRARIES}/libcuda.so.1": "libcuda.so.1.2",
    f"{LIBRARIES}/libnvidia-ml.so.1": "libnvidia-ml.so.1.2",
    **{f"sys/bus/pci/devices/{bus}/driver": "../../drivers/nvidia" for bus in GPUS},
    **{f"dev/dev/dri/by-path/pci-{bus}-card": f"../card{bus[6]}" for bus in GPUS},
}
Change = Callable[[Path], object]


def build(directory: Path) -> Path:
    """Make the host in *directory*, which is empty or not there, and return it."""
    for path, text in FILES.items():
        write(directory / path, text)
    for path, target in LINKS.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).symlink_to(target)
    return directory


def plan(host: Path, **options: Any) -> dict[str, list[Any]]:
    """Return what to ask of *host*, and of what a snapshot is made from besides."""
    places = ["xdg/gpuruntime/config.toml", "etc/gpuruntime/config.toml"]
    return {
        **fingerprint.plan(
            str(host / "driver"),
            str(host / "dev"),
            proc=str(host / "proc"),
            sys=str(host / "sys"),
            **options,
        ),
        "config": [probes.IDENTITY, [str(host / place) for place in places]],
        "CDI specs": [
            probes.IDENTITY,
            [str(host / "specs"), str(host / "specs/vendor.json")],
        ],
    }


def write(path: Path, text: str = "") -> None:
    """Write a file and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def renew(path: Path) -> None:
    """Replace a directory by an equal one, as loading a module again does in sysfs."""
    # Kept until the new one is there, so that the inode number is another.
    path.rename(path.with_name(f"{path.name} of before"))
    shutil.copytree(path.with_name(f"{path.name} of before"), path, symlinks=True)


def relink(path: Path, target: str) -> None:
    """Have the link *path* lead to *target*."""
    path.unlink()
    path.symlink_to(target)


def touch(path: Path) -> None:
    """Give *path* another time, an older one."""
    os.utime(path, ns=(1, 1))


def rewrite(path: Path, text: str) -> None:
    """Write to *path* in place, and set its times back as some tools do."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
