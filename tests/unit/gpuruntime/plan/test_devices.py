# SPDX-License-Identifier: Apache-2.0
"""A device that is asked for and left out: the error has the reason and what to do."""

from __future__ import annotations

import pytest

from gpuruntime.errors import UnresolvedDeviceError
from gpuruntime.model import Gpu, GpuNodes, LeftOutDevice, Node
from gpuruntime.plan import devices

NODE = Node(host_path="/dev/nvidia0", container_path="/dev/nvidia0")
GPUS = [GpuNodes(gpu=Gpu(index=0, uuid="GPU-aa", minor=0, name="", mig_enabled=True), node=NODE)]
LOST = LeftOutDevice(
    name="1", uuid="GPU-bb11", bus_id="0000:1b:00.0", reason="GPU is lost", hint="reset it"
)
TAKEN = LeftOutDevice(bus_id="0000:1c:00.0", reason="vfio-pci has it", hint="bind it")
MIG = LeftOutDevice(name="0:3", uuid="MIG-cc", reason="no device node", hint="make it")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("1", LOST),
        ("01", LOST),
        ("GPU-bb11", LOST),
        ("gpu-BB", LOST),
        ("0000:1b:00.0", LOST),
        ("00000000:1B:00.0", LOST),
        ("1b:00.0", LOST),
        ("1c:00.0", TAKEN),
        ("0:3", MIG),
        ("0/3", MIG),
        ("MIG-c", MIG),
    ],
)
def test_the_reason_and_what_to_do(name: str, device: LeftOutDevice) -> None:
    """By whichever of its names it is asked for."""
    with pytest.raises(UnresolvedDeviceError) as caught:
        devices.devices(["0", name], GPUS, [LOST, TAKEN, MIG])
    assert caught.value.message == f'the device "{name}" is not available: {device}'
    assert caught.value.hint == device.hint


@pytest.mark.parametrize("name", ["2", "1:0", "GPU-ee", "0:4", "1d:00.0", "MIG-d"])
def test_another_device_is_unknown(name: str) -> None:
    """The error lists what there is, and what is left out."""
    with pytest.raises(UnresolvedDeviceError) as caught:
        devices.devices([name], GPUS, [LOST, TAKEN])
    assert caught.value.message == (
        f'there is no device "{name}"; available devices: 0; left out: GPU 1 (GPU is lost), '
        "GPU 0000:1c:00.0 (vfio-pci has it)"
    )


def test_of_many_the_first_are_named() -> None:
    """A message has a bounded length."""
    with pytest.raises(UnresolvedDeviceError, match=r"GPU 0000:1c:00.0 .* and 60 more\Z"):
        devices.devices(["9"], GPUS, [TAKEN] * 64)


def test_a_left_out_device_does_not_hide_one_that_is_there() -> None:
    """A UUID that the driver does not know is the beginning of none."""
    assert [device.uuid for device in devices.devices(["0"], GPUS, [MIG])] == ["GPU-aa"]
    with pytest.raises(UnresolvedDeviceError, match="there is no device"):
        devices.devices(["GPU-ff"], GPUS, [TAKEN])
