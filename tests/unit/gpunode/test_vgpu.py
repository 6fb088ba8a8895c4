# SPDX-License-Identifier: Apache-2.0
"""The configuration space of virtual GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.labels import Vgpu
from gpunode.vgpu import of_config_space

DRIVER = bytes((0, 22)) + b"460.16".ljust(10, b"\0") + b"r460_00".ljust(10, b"\0")


def space(*capabilities: bytes, status: int = 0x10) -> bytes:
    """Return a configuration space with a list of *capabilities*; `next` is filled in."""
    data = bytearray(256)
    data[0x06] = status
    position, link = 0x40, 0x34
    for capability in capabilities:
        data[link] = position
        data[position : position + len(capability)] = capability
        link, position = position + 1, position + len(capability)
    return bytes(data)


def vendor(*records: bytes, signature: bytes = b"VF") -> bytes:
    """Return a vendor-specific capability."""
    data = signature + b"".join(records)
    return bytes((9, 0, len(data) + 3)) + data


@pytest.mark.parametrize(
    ("config", "vgpu"),
    [
        (space(bytes((5, 0, 0x81, 0, 0)), vendor(DRIVER)), Vgpu("460.16", "r460_00")),
        (space(vendor(bytes((7, 4, 1, 2)), DRIVER)), Vgpu("460.16", "r460_00")),
        (space(vendor(DRIVER, signature=b"P2")), None),
        (space(vendor(DRIVER), status=0), None),
        (space(vendor(DRIVER))[:64], None),
        (space(), None),
        # Without a usable record of the driver.
        (space(vendor(DRIVER[:9])), Vgpu()),
        (space(vendor(bytes((7, 0)), DRIVER)), Vgpu()),
    ],
)
def test_virtual_gpus(config: bytes, vgpu: Vgpu | None) -> None:
    """They are known by the signature of their capability."""
    assert of_config_space(config) == vgpu


@given(st.binary(min_size=200, max_size=300))
def test_any_space_is_read(data: bytes) -> None:
    """A list that loops or leads outside ends."""
    patched = bytearray(data)
    patched[0x06] |= 0x10
    of_config_space(bytes(patched))
