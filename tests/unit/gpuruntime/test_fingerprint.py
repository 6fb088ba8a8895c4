# SPDX-License-Identifier: Apache-2.0
"""Each fact that a spec is computed from changes the fingerprint, and is named as what changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuruntime.discover import fingerprint

LIBRARIES = "driver/usr/lib/x86_64-linux-gnu"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Return a host with a driver, two GPUs, one of them in MIG mode."""
    for path, text in {
        "proc/devices": "195 nvidia\n511 nvidia-uvm\n",
        "proc/driver/nvidia/version": "NVRM version: 1.2\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "",
        "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access": "",
        "sys/module/nvidia/version": "1.2",
        "sys/module/nvidia_uvm/version": "1.2",
        "driver/etc/ld.so.cache": "",
        "driver/usr/bin/nvidia-smi": "",
        "driver/usr/share/vulkan/icd.d/other.json": "",
        "driver/lib/firmware/nvidia/other": "",
        f"{LIBRARIES}/libcuda.so.1.2": "x",
        f"{LIBRARIES}/libnvidia-ml.so.1.2": "x",
        "dev/dev/nvidia0": "",
        "dev/dev/nvidia-caps/nvidia-cap1": "",
        "dev/dev/dri/card0": "",
        "dev/dev/sda": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / LIBRARIES / "libcuda.so.1").symlink_to("libcuda.so.1.2")
    return tmp_path


def read(host: Path) -> fingerprint.Fingerprint:
    """Return the fingerprint of *host*."""
    return fingerprint.read(
        str(host / "driver"),
        str(host / "dev"),
        proc=str(host / "proc"),
        sys=str(host / "sys"),
    )


def renewed(path: Path) -> None:
    """Replace a directory by an equal one, as loading a module again does in sysfs."""
    # Kept until the new one is there, so that the inode number is another.
    path.rename(path.with_name("old"))
    shutil.copytree(path.with_name("old"), path)


def touched(path: Path) -> None:
    """Give *path* another time, an older one."""
    os.utime(path, ns=(1, 1))


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "module loaded again": ("modules", lambda h: renewed(h / "sys/module/nvidia")),
    "uvm loaded again": ("modules", lambda h: renewed(h / "sys/module/nvidia_uvm")),
    "uvm unloaded": ("modules", lambda h: shutil.rmtree(h / "sys/module/nvidia_uvm")),
    "majors moved": ("majors", lambda h: (h / "proc/devices").write_text("510 nvidia-uvm\n")),
    "GPU gone": ("GPUs", lambda h: shutil.rmtree(h / "proc/driver/nvidia/gpus/0000:01:00.0")),
    "MIG device made": (
        "MIG devices",
        lambda h: (h / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci1").mkdir(),
    ),
    "user space upgraded": (
        "libraries",
        lambda h: (h / LIBRARIES / "libcuda.so.1.2").write_text("xx"),
    ),
    "package added": (
        "library directories",
        lambda h: (h / LIBRARIES / "libnvidia-encode.so.1.2").touch(),
    ),
    "ICD added": (
        "other files",
        lambda h: (h / "driver/usr/share/vulkan/icd.d/nvidia_icd.json").touch(),
    ),
    "firmware added": (
        "other files",
        lambda h: (h / "driver/lib/firmware/nvidia/1.2").mkdir(),
    ),
    "program replaced": ("programs", lambda h: touched(h / "driver/usr/bin/nvidia-smi")),
    "cache written": ("loader cache", lambda h: touched(h / "driver/etc/ld.so.cache")),
    "driver container restarted": ("driver root", lambda h: renewed(h / "driver")),
    "mode of a node": ("device nodes", lambda h: (h / "dev/dev/nvidia0").chmod(0o600)),
    "group of a node": ("device nodes", lambda h: os.chown(h / "dev/dev/dri/card0", 0, 44)),
    "node of a capability": (
        "device nodes",
        lambda h: (h / "dev/dev/nvidia-caps/nvidia-cap2").touch(),
    ),
    "persistenced started": (
        "sockets",
        lambda h: (h / "driver/run/nvidia-persistenced/socket").mkdir(parents=True),
    ),
    "MPS started": ("sockets", lambda h: (h / "driver/tmp/nvidia-mps").mkdir(parents=True)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen_and_named(host: Path, what: str) -> None:
    """The spec would be wrong otherwise, with nobody to notice."""
    before = read(host)
    part, change = CHANGES[what]
    change(host)
    after = read(host)
    assert part in fingerprint.changes(before, after)


def test_nothing_changed_is_no_change(host: Path) -> None:
    """Nor does it matter what other devices do."""
    before = read(host)
    (host / "dev/dev/sda").chmod(0o600)
    after = read(host)
    assert fingerprint.changes(before, after) == []
    assert before == after
