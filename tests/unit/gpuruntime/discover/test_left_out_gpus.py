# SPDX-License-Identifier: Apache-2.0
"""GPUs that NVML does not offer: what the kernel says about each."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuruntime import remedies
from gpuruntime.discover import left_out_gpus
from gpuruntime.model import Gpu, LeftOutDevice

BUS_IDS = ("0000:1a:00.0", "0000:1b:00.0", "10000:01:00.0")


def uuid(index: int) -> str:
    """Return the UUID of GPU *index*."""
    return f"GPU-5f1e000{index}-9a3c-4d27-8b60-0c1d2e3f4a00"


def gpu(index: int, bus_id: str) -> Gpu:
    """Return a GPU that NVML describes."""
    return Gpu(index=index, uuid=uuid(index), minor=index, name="", bus_id=bus_id)


class Kernel:
    """/proc and /sys of a machine with three GPUs of the module nvidia."""

    def __init__(self, directory: Path) -> None:
        self.proc = directory / "proc"
        self.sys = directory / "sys"
        for index, bus_id in enumerate(BUS_IDS):
            self.on_bus(bus_id, "nvidia")
            self.of_driver(bus_id, uuid(index))

    def on_bus(self, bus_id: str, driver: str, **files: str) -> None:
        """Put a device on the PCI bus, by default a GPU."""
        device = self.sys / "bus/pci/devices" / bus_id
        device.mkdir(parents=True)
        for name, text in {"vendor": "0x10de", "class": "0x030200", **files}.items():
            (device / name).write_text(f"{text}\n")
        if driver:
            (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")

    def of_driver(self, bus_id: str, uuid: str, excluded: str = "No", minor: int = 0) -> None:
        """Have the module nvidia list a GPU."""
        entry = self.proc / "driver/nvidia/gpus" / bus_id
        entry.mkdir(parents=True, exist_ok=True)
        (entry / "information").write_text(
            f"GPU UUID: \t {uuid}\nDevice Minor: \t {minor}\nGPU Excluded:\t {excluded}\n"
        )

    def unlisted(self, *listed: str) -> tuple[list[str], list[str]]:
        """Return the sentences about the GPUs that are not *listed*."""
        found = left_out_gpus.unlisted(
            listed, lambda path: path == "/dev/nvidia0", proc=str(self.proc), sys=str(self.sys)
        )
        return [str(device) for device in found[0]], [str(device) for device in found[1]]


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    """Give a machine with three GPUs."""
    return Kernel(tmp_path)


def test_no_gpu_is_left_out_where_nvml_lists_all(kernel: Kernel) -> None:
    """Nothing is said of a machine that is well."""
    assert kernel.unlisted(*BUS_IDS) == ([], [])


@pytest.mark.parametrize(
    ("driver", "reason", "hint"),
    [
        (
            "vfio-pci",
            'the kernel driver "vfio-pci" has it',
            "take the GPUs out of the options",
        ),
        ("nouveau", 'the kernel driver "nouveau" has it', 'write "blacklist nouveau" to a file'),
        ("", "no kernel driver has it", remedies.CHECK_LOG),
    ],
)
def test_a_gpu_of_another_kernel_driver(
    kernel: Kernel, driver: str, reason: str, hint: str
) -> None:
    """It is named, with what it needs; "modprobe nvidia" would not help."""
    kernel.on_bus("0000:ca:00.0", driver)
    at_fault, (device,) = left_out_gpus.unlisted(
        BUS_IDS, proc=str(kernel.proc), sys=str(kernel.sys)
    )
    assert at_fault == []
    assert str(device) == f"GPU 0000:ca:00.0 is left out: {reason}"
    assert device.hint.startswith(hint)
    assert "modprobe nvidia" not in device.hint


@pytest.mark.parametrize(
    "files",
    [{"vendor": "0x8086"}, {"class": "0x040300"}, {"physfn": ""}],
    ids=["another vendor", "an audio function", "a virtual function"],
)
def test_what_is_not_a_gpu_of_the_host(kernel: Kernel, files: dict[str, str]) -> None:
    """Nobody can ask for it."""
    kernel.on_bus("0000:ca:00.0", "vfio-pci", **files)
    assert kernel.unlisted(*BUS_IDS) == ([], [])


def test_a_gpu_that_nvml_no_longer_lists(kernel: Kernel) -> None:
    """It fell off the bus before NVML was initialised."""
    assert kernel.unlisted(BUS_IDS[0], BUS_IDS[2]) == (
        [
            f"GPU {BUS_IDS[1]} is left out: the module nvidia has it, but NVML does not list it",
        ],
        [],
    )


def test_a_gpu_without_a_node_is_no_fault(kernel: Kernel) -> None:
    """As in a container that has some of the machine's GPUs: NVML lists those alone."""
    kernel.of_driver(BUS_IDS[1], uuid(1), minor=1)
    at_fault, (sentence,) = kernel.unlisted(BUS_IDS[0], BUS_IDS[2])
    assert at_fault == []
    assert sentence == f'GPU {BUS_IDS[1]} is left out: no device node "/dev/nvidia1"'


def test_an_excluded_gpu_is_no_fault(kernel: Kernel) -> None:
    """The operator excluded it."""
    kernel.of_driver(BUS_IDS[1], uuid(1), excluded="Yes")
    at_fault, (sentence,) = kernel.unlisted(BUS_IDS[0], BUS_IDS[2])
    assert at_fault == []
    assert "NVreg_ExcludedGpus" in sentence


def failed(name: str, bus_id: str = "") -> LeftOutDevice:
    """Return a device for which NVML returned an error."""
    return LeftOutDevice(name=name, bus_id=bus_id, reason="GPU is lost", hint="reset it")


def test_a_failed_gpu_gets_its_bus_id_and_uuid(kernel: Kernel) -> None:
    """By its place among the others, which NVML and the kernel both number by bus id."""
    others = [gpu(0, BUS_IDS[0]), gpu(2, BUS_IDS[2])]
    (device,) = left_out_gpus.completed([failed("1")], others, proc=str(kernel.proc))
    assert (device.bus_id, device.uuid) == (BUS_IDS[1], uuid(1))
    assert (device.name, device.reason, device.hint) == ("1", "GPU is lost", "reset it")


def test_a_bus_id_is_not_guessed(kernel: Kernel) -> None:
    """Where the kernel's order is not NVML's, only what NVML says counts."""
    others = [gpu(0, BUS_IDS[1]), gpu(2, BUS_IDS[2])]
    (device,) = left_out_gpus.completed([failed("1")], others, proc=str(kernel.proc))
    assert (device.bus_id, device.uuid) == ("", "")
    (device,) = left_out_gpus.completed([failed("1", BUS_IDS[0])], others, proc=str(kernel.proc))
    assert (device.bus_id, device.uuid) == (BUS_IDS[0], uuid(0))


def test_a_failed_mig_device_stays_as_it_is(kernel: Kernel) -> None:
    """It has no bus id of its own."""
    devices = left_out_gpus.completed(
        [failed("0:1")], [gpu(i, b) for i, b in enumerate(BUS_IDS)], proc=str(kernel.proc)
    )
    assert devices == (failed("0:1"),)


def test_a_machine_without_these_files(tmp_path: Path) -> None:
    """Not each kernel has them."""
    empty = str(tmp_path)
    assert left_out_gpus.unlisted((), proc=empty, sys=empty) == ([], [])
    assert left_out_gpus.completed([failed("0")], [], proc=empty) == (failed("0"),)
