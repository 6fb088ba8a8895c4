# SPDX-License-Identifier: Apache-2.0
"""Which device nodes there are to be, by what the kernel says; making them is in tests/system."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuruntime.cli import system_devices as devices
from gpuruntime.cli import system_links
from gpuruntime.errors import DriverError


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("", {}),
        ("Character devices:\n  1 mem\n195 nvidia\n", {"nvidia": 195}),
        ("195 nvidia-frontend\n", {"nvidia-frontend": 195, "nvidia": 195}),
        ("195 nvidia-frontend\n200 nvidia\n", {"nvidia-frontend": 195, "nvidia": 200}),
        ("510 nvidia-uvm\nBlock devices:\n511 nvidia-uvm\n", {"nvidia-uvm": 511}),
        ("x nvidia\n195nvidia\n 195  nvidia \n", {"nvidia": 195}),
        ("195 nvidia two\n9999999999 nvidia\n", {}),
    ],
)
def test_majors(text: str, known: dict[str, int]) -> None:
    """A later line wins, and the module has two names."""
    assert devices.majors(text) == known


def test_instances_go_on_while_there_is_no_gap() -> None:
    """The driver lists each that a GPU can have."""
    text = "".join(
        f"{name} {minor}\n"
        for minor, name in enumerate(
            (
                *("config", "monitor", "gpu0/gi0/access", "gpu0/gi0/ci0/access"),
                *("gpu0/gi0/ci2/access", "gpu0/gi1/access", "gpu0/gi3/access"),
                *("gpu1/gi0/access", "no number"),
            )
        )
    )
    minors = devices.mig_minors(text)
    assert devices.possible_instances(minors, 0) == [
        *("gpu0/gi0/access", "gpu0/gi0/ci0/access", "gpu0/gi1/access"),
    ]
    assert devices.possible_instances(minors, 2) == []


def write(path: Path, text: str = "") -> None:
    """Write a file, and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_existing_instances_and_their_modes(tmp_path: Path) -> None:
    """Who may change the layout is root alone; who has a device may be anybody."""
    tree = tmp_path / "driver/nvidia/capabilities"
    for name in ("mig/config", "gpu0/mig/gi7/access", "gpu0/mig/gi7/ci0/access", "gpu0/mig/odd"):
        write(tree / name)
    names = devices.existing_instances(str(tmp_path))
    assert names == ["config", "monitor", "gpu0/gi7/access", "gpu0/gi7/ci0/access"]
    minors = {name: minor for minor, name in enumerate(names, 1)}
    found = devices.capabilities({"nvidia-caps": 236}, minors, names)
    assert [(item.name, item.minor, item.mode) for item in found] == [
        ("nvidia-caps/nvidia-cap1", 1, 0o400),
        ("nvidia-caps/nvidia-cap2", 2, 0o444),
        ("nvidia-caps/nvidia-cap3", 3, 0o444),
        ("nvidia-caps/nvidia-cap4", 4, 0o444),
    ]
    assert devices.existing_instances(str(tmp_path / "nothing")) == []


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    """Displays and 3D controllers of NVIDIA; not their sound, not others' displays."""
    for name, vendor, kind in (
        ("0000:01:00.0", "0x10de", "0x030000"),
        ("0000:01:00.1", "0x10de", "0x040300"),
        ("0000:02:00.0", "0x10de", "0x030200"),
        ("0000:03:00.0", "0x8086", "0x030000"),
    ):
        write(tmp_path / f"bus/pci/devices/{name}/vendor", f"{vendor}\n")
        write(tmp_path / f"bus/pci/devices/{name}/class", f"{kind}\n")
    assert devices.count_on_bus(str(tmp_path)) == 2
    assert devices.count_on_bus(str(tmp_path / "nothing")) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0o666, 0, 0)),
        ("DeviceFileUID: 0\nDeviceFileGID: 27\nDeviceFileMode: 432\n", (0o660, 0, 27)),
        ("DeviceFileMode: many\nDeviceFileUID: -1\n", (0o666, 0, 0)),
    ],
)
def test_ownership(tmp_path: Path, text: str, expected: tuple[int, int, int]) -> None:
    """The driver tells its parameters in decimal."""
    write(tmp_path / "driver/nvidia/params", text)
    assert devices.ownership(str(tmp_path)) == expected


def test_all_links_need_the_majors_of_all_modules(tmp_path: Path) -> None:
    """A link with a guessed number would lead systemd to another device."""
    write(tmp_path / "proc/devices", "195 nvidia\n511 nvidia-uvm\n")
    found = system_links.every(str(tmp_path / "proc"), str(tmp_path / "sys"))
    assert [item.numbers for item in found] == ["195:255", "195:254", "511:0", "511:1"]
    write(tmp_path / "proc/driver/nvidia-caps/mig-minors", "config 1\n")
    with pytest.raises(DriverError, match="missing required device major nvidia-caps"):
        system_links.every(str(tmp_path / "proc"), str(tmp_path / "sys"))
    write(tmp_path / "proc/devices")
    with pytest.raises(DriverError, match="no NVIDIA devices found"):
        system_links.every(str(tmp_path / "proc"), str(tmp_path / "sys"))
