# SPDX-License-Identifier: Apache-2.0
"""What is put together of driver root, NVML and dev root, and what decides the platform."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_roots import VERSION, build
from simhost import artefacts

from gpuruntime.discover.inventory import discover, discover_features
from gpuruntime.errors import DiscoveryError, DriverError
from gpuruntime.model import File, Inventory
from gpuruntime.snapshots import inventory_json

LAYOUT = {"aarch64": "aarch64"}.get(platform.machine(), "ubuntu")
GPUS = (
    "gpu GPU-5f1e0000-9a3c-4d27-8b60-0c1d2e3f4a00 0 0000:1a:00.0 81559 0 NVIDIA A100",
    "arch 0 8 0",
    "brand 0 2",
)
CONTROL = ("nvidiactl", "nvidia-uvm")


class Machine:
    """A driver root whose NVML answers, and a dev root."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.dev = directory / "devs"
        (self.dev / "dev").mkdir(parents=True)
        build(self.root, LAYOUT)
        self._nvml = self.root / artefacts.LIBRARY_DIRECTORY / f"libnvidia-ml.so.{VERSION}"
        self._nvml.unlink()
        shutil.copy(artefacts.fake_nvml(), self._nvml)
        self.say(*GPUS)

    def say(self, *lines: str) -> None:
        """Have NVML say *lines*."""
        text = "\n".join((f"driver {VERSION}", "cuda 12040", *lines, ""))
        self._nvml.with_name("fakenvml.conf").write_text(text)

    def without_nvml(self) -> None:
        """Take NVML away."""
        for path in self.root.glob("**/libnvidia-ml.so*"):
            path.unlink()

    def make(self, *names: str) -> None:
        """Make nodes; none has a driver behind it."""
        for name in names:
            path = self.dev / "dev" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mknod(path, stat.S_IFCHR, os.makedev(195, 99))
            path.chmod(0o666)

    def write(self, path: str, text: str = "") -> None:
        """Write a file below the driver root."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def discover(self, *, strict: bool = True) -> Inventory:
        """Discover what is here."""
        return discover(str(self.root), str(self.dev), strict=strict)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Give a machine with a driver and no node; where none can be made, the test is skipped."""
    try:
        os.mknod(tmp_path / "try", stat.S_IFCHR | 0o600, os.makedev(195, 99))
    except PermissionError:
        pytest.skip("device nodes cannot be made here: needs root with CAP_MKNOD")
    yield Machine(tmp_path)
    shutil.rmtree(tmp_path)


def test_everything_is_in_the_inventory(machine: Machine) -> None:
    """And comes back from the snapshot."""
    machine.make("nvidia0", "nvidia-fs0", "gdrdrv", *CONTROL)
    found = machine.discover()
    assert found.driver.version == VERSION
    assert found.cuda_version == "12.4"
    assert [(item.gpu.architecture, item.gpu.brand) for item in found.gpus] == [("8.0", "tesla")]
    assert [node.container_path for node in found.features["gdrcopy"]] == ["/dev/gdrdrv"]
    assert found.problems == ()
    assert inventory_json.decode(inventory_json.encode(found)) == found


def test_the_files_are_those_of_the_version_that_nvml_reports(machine: Machine) -> None:
    """They are searched for before NVML has answered, by the version of the loaded module."""
    machine.make("nvidia0", *CONTROL)
    without_module = machine.discover()
    machine.write("proc/driver/nvidia/version", f"NVRM version: Kernel Module  {VERSION}  today")
    assert machine.discover() == without_module
    machine.say(*GPUS, "driver 551.23")
    with pytest.raises(DriverError, match=r"551\.23"):
        machine.discover()


@pytest.mark.parametrize("missing", [("nvidia-uvm",), ("nvidiactl",), CONTROL])
def test_control_nodes_may_be_made_later(machine: Machine, missing: tuple[str, ...]) -> None:
    """B046: by whoever injects; without that they are an error at once."""
    there = [name for name in CONTROL if name not in missing]
    machine.make("nvidia0", *there)
    with pytest.raises(DiscoveryError, match="no device node"):
        machine.discover()
    found = machine.discover(strict=False)
    assert {node.container_path for node in found.control_nodes} == {f"/dev/{n}" for n in there}
    assert len(found.gpus) == 1


def test_a_host_without_gpus_has_its_driver(machine: Machine) -> None:
    """B126: `none` gives a container the driver alone, on a build machine as well."""
    machine.say()
    with pytest.raises(DiscoveryError, match="no GPU can be used"):
        machine.discover()
    found = machine.discover(strict=False)
    assert (found.gpus, found.control_nodes, found.problems) == ((), (), ())
    assert any(library.soname == "libcuda.so.1" for library in found.driver.libraries)


def test_a_driver_that_is_not_loaded_is_an_error(machine: Machine) -> None:
    """Nobody knows then which GPUs there would be."""
    machine.say("fault init-fails 9")
    for strict in (True, False):
        with pytest.raises(DriverError, match="Driver Not Loaded"):
            machine.discover(strict=strict)


def test_mig_devices_without_nodes_are_left_out(machine: Machine) -> None:
    """B114: with a sentence; the GPU has the others still."""
    machine.say(
        GPUS[0].replace(" 0 NVIDIA", " 1 NVIDIA"),
        "mig 0 0 MIG-3a7c0000-51d2-5e0b-9f14-0b2a3c4d5e00 7 0 1 1 9856",
    )
    machine.make("nvidia0", *CONTROL)
    found = machine.discover()
    assert found.gpus[0].mig == ()
    assert len(found.gpus[0].gpu.mig_devices) == 1
    (problem,) = found.problems
    assert problem.startswith("MIG device 0:0 is left out: ")
    (device,) = found.left_out
    assert (device.name, str(device)) == ("0:0", problem)
    assert device.uuid == "MIG-3a7c0000-51d2-5e0b-9f14-0b2a3c4d5e00"


def test_gpus_without_a_node_or_an_answer_are_left_out(machine: Machine) -> None:
    """Each with its index and the reason; the snapshot keeps them."""
    lines = [GPUS[0].replace("4a00 0 0000:1a", f"4a0{i} {i} 0000:1{i}") for i in range(3)]
    machine.say(*lines, "fault lost 2")
    machine.make("nvidia0", *CONTROL)
    found = machine.discover()
    assert [item.gpu.index for item in found.gpus] == [0]
    assert [(device.name, device.bus_id) for device in found.left_out] == [
        ("2", ""),
        ("1", "0000:11:00.0"),
    ]
    assert tuple(map(str, found.left_out)) == found.problems
    assert "no device node" in found.left_out[1].reason
    assert inventory_json.decode(inventory_json.encode(found)) == found


def test_why_no_gpu_can_be_used(machine: Machine) -> None:
    """The hint is about the GPU that is left out."""
    machine.make(*CONTROL)
    with pytest.raises(DiscoveryError, match='no device node "/dev/nvidia0"') as caught:
        machine.discover()
    assert caught.value.hint is not None
    assert str(machine.dev) in caught.value.hint


def test_storage_needs_files_as_well(machine: Machine) -> None:
    """Those below the driver root, else the host's; none without the nodes of storage."""
    machine.make("nvidia0", *CONTROL)
    (machine.root / "run/udev").mkdir(parents=True)
    machine.write("etc/cufile.json", "{}")
    assert discover_features(str(machine.root), str(machine.dev), "gds").gds_files == ()
    assert machine.discover().gds_files == ()
    machine.make("nvidia-fs0")
    ours = files(str(machine.root), "/run/udev", "/etc/cufile.json")
    assert machine.discover().gds_files == ours
    assert discover_features(str(machine.root), str(machine.dev), "gds").gds_files == ours
    # Neither a directory for the file, nor a link for the directory.
    (machine.root / "etc/cufile.json").unlink()
    (machine.root / "etc/cufile.json").mkdir()
    (machine.root / "run/udev").rmdir()
    (machine.root / "run/udev").symlink_to("/etc")
    there = [path for path in ("/run/udev",) if os.path.isdir(path) and not os.path.islink(path)]
    there += [path for path in ("/etc/cufile.json",) if os.path.isfile(path)]
    assert machine.discover().gds_files == files("", *there)


def files(prefix: str, *paths: str) -> tuple[File, ...]:
    """Return *paths* with *prefix* on the host."""
    return tuple(
        File(kind="config", host_path=f"{prefix}{path}", container_path=path) for path in paths
    )


def test_features_need_no_driver(machine: Machine) -> None:
    """The modules of storage and network are others' than the driver's."""
    machine.without_nvml()
    machine.make("infiniband/uverbs0")
    found = discover_features(str(machine.root), str(machine.dev), "mofed")
    assert found.problems == ('mofed is incomplete: no device node "/dev/infiniband/rdma_cm"',)
    assert [node.container_path for node in found.features["mofed"]] == ["/dev/infiniband/uverbs0"]
    assert (found.gpus, found.driver.libraries, found.driver.version) == ((), (), "")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("etc/nv_tegra_release", "# R36 (release), REVISION: 4.0\n"),
        ("sys/devices/soc0/family", "Tegra\n"),
        ("sys/devices/soc0/family", "tegra234\n"),
    ],
)
def test_a_tegra_without_nvml_needs_its_csv_files(machine: Machine, path: str, text: str) -> None:
    """B050: with an NVML that lists a discrete GPU it is as any other machine, and says so."""
    machine.make("nvidia0", *CONTROL)
    machine.write(path, text)
    inventory = machine.discover()
    assert inventory.driver.platform == "nvml"
    assert "the marks of Tegra do not count" in inventory.decision
    machine.without_nvml()
    with pytest.raises(DiscoveryError, match=r"no CSV file can be used: .*devices\.csv") as caught:
        machine.discover()
    assert "--csv.file" in str(caught.value.hint)


def test_other_families_are_not_tegra(machine: Machine) -> None:
    """Another chip's family, or a directory in place of the file."""
    machine.without_nvml()
    machine.write("sys/devices/soc0/family", "Snapdragon tegra\n")
    (machine.root / "etc/nv_tegra_release").mkdir(parents=True)
    with pytest.raises(DriverError, match=r"no \"libnvidia-ml\.so\.1\""):
        machine.discover()


@pytest.mark.parametrize("directory", ["usr/lib/wsl/lib", "usr/lib64"])
def test_wsl_needs_both_of_its_marks(machine: Machine, directory: str) -> None:
    """WSL is decided before NVML, which it has as well; a mode decides otherwise."""
    machine.make("nvidia0", *CONTROL)
    machine.write(f"{directory}/libdxcore.so")
    assert machine.discover().decision == ""
    machine.make("dxg")
    # The file is not a library.
    with pytest.raises(DriverError, match=r"libdxcore\.so"):
        machine.discover()
    inventory = discover(str(machine.root), str(machine.dev), mode="nvml")
    assert (len(inventory.gpus), inventory.driver.platform) == (1, "nvml")
    assert "the marks of WSL do not count" in inventory.decision
    (machine.root / directory / "libdxcore.so").unlink()
    assert machine.discover().gpus


@pytest.mark.parametrize(
    ("kernel", "dxg", "told"),
    [
        ("4.4.0-19041-Microsoft", False, "this is WSL 1"),
        ("5.15.1-microsoft-standard-WSL2", False, 'WSL 2 has no "/dev/dxg"'),
        ("5.15.1-microsoft-standard-WSL2", True, 'no "libdxcore.so" in "/usr/lib/wsl/lib"'),
    ],
)
def test_why_wsl_has_no_gpu(machine: Machine, kernel: str, dxg: bool, told: str) -> None:
    """B024: three causes, three messages."""
    machine.without_nvml()
    machine.write("proc/sys/kernel/osrelease", f"{kernel}\n")
    if dxg:
        machine.make("dxg")
    with pytest.raises(DriverError) as caught:
        machine.discover()
    assert told in caught.value.message
    assert "on Windows" in str(caught.value.hint)


def test_the_environment_can_be_left_out_of_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is not to depend on the variables of whoever made it."""
    machine.make("nvidia0", *CONTROL)
    machine.write("opt/data/vulkan/icd.d/nvidia_other.json", "{}")
    monkeypatch.setenv("XDG_DATA_DIRS", "/opt/data")
    for environment in (True, False):
        found = discover(str(machine.root), str(machine.dev), environment=environment)
        names = [os.path.basename(file.host_path) for file in found.driver.files]
        assert ("nvidia_other.json" in names) == environment


SECOND = "gpu GPU-5f1e0000-9a3c-4d27-8b60-0c1d2e3f4a01 1 0000:1b:00.0 81559 0 NVIDIA A100"


@pytest.mark.parametrize(
    ("nodes", "files", "uuids", "drm"),
    [
        # A node of one of two GPUs, and no /proc/driver.
        (("nvidia1",), (), [1], []),
        (("nvidia0", "nvidia1"), (), [0, 1], []),
        # DRM in part: the kernel lists two nodes, the guest has one.
        (
            ("nvidia0", "dri/renderD129"),
            (
                "sys/bus/pci/devices/0000:1a:00.0/drm/card1/dev",
                "sys/bus/pci/devices/0000:1a:00.0/drm/renderD129/dev",
            ),
            [0],
            ["/dev/dri/renderD129"],
        ),
        # The version alone, without the directories of GPUs.
        (("nvidia0",), ("proc/driver/nvidia/params",), [0], []),
        (("nvidia0",), ("proc/driver/nvidia/gpus/0000:1a:00.0/information",), [0], []),
    ],
)
def test_a_guest_of_lxc_has_what_exists(
    machine: Machine,
    nodes: tuple[str, ...],
    files: tuple[str, ...],
    uuids: list[int],
    drm: list[str],
) -> None:
    """Incus and LXC pass on some nodes, and /proc and /sys in part; a GPU without one is named."""
    machine.say(*GPUS, SECOND)
    machine.make(*nodes, *CONTROL)
    for path in files:
        machine.write(path)
    found = discover(
        str(machine.root),
        str(machine.dev),
        proc=str(machine.root / "proc"),
        sys=str(machine.root / "sys"),
    )
    assert [item.gpu.index for item in found.gpus] == uuids
    assert [node.container_path for item in found.gpus for node in item.drm] == drm
    left_out = [index for index in (0, 1) if index not in uuids]
    assert [device.name for device in found.left_out] == [str(index) for index in left_out]
    assert len(found.problems) == len(left_out)
