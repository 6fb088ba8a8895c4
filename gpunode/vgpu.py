# SPDX-License-Identifier: Apache-2.0
"""The driver of the hypervisor of a virtual GPU, from its PCI configuration space; pure.

A virtual GPU has a vendor-specific capability (PCI Local Bus Specification, 6.7) with "VF" as its
first data. Records follow: a number, a length that includes both bytes, data. Record 0 has the
version of the host's driver and its branch.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.labels import Vgpu

# Offsets in the configuration space, and a bit of the status register.
_STATUS, _HAS_CAPABILITIES, _FIRST_CAPABILITY = 0x06, 0x10, 0x34
_VENDOR_SPECIFIC = 0x09
_SIGNATURE = b"VF"
_FIRST_RECORD = 5
_DRIVER_RECORD = 0
_TEXT_BYTES = 10
# The space that a process without privileges can read is shorter.
SPACE_BYTES = 256


def of_config_space(space: bytes) -> Vgpu | None:
    """Return what a virtual GPU reports in *space*, None if the device is not a virtual GPU."""
    for capability in _capabilities(space[:SPACE_BYTES]):
        if capability[0] == _VENDOR_SPECIFIC and capability[3:5] == _SIGNATURE:
            return _driver(capability)
    return None


def _capabilities(space: bytes) -> Iterator[bytes]:
    """Yield the capabilities of *space*, at least five bytes of each; stop at a broken list."""
    if len(space) < SPACE_BYTES or not space[_STATUS] & _HAS_CAPABILITIES:
        return
    seen = set()
    position = space[_FIRST_CAPABILITY]
    while position and position not in seen and position + _FIRST_RECORD <= SPACE_BYTES:
        seen.add(position)
        # Only vendor-specific capabilities have their length in the third byte.
        yield space[position : position + max(space[position + 2], _FIRST_RECORD)]
        position = space[position + 1]


def _driver(capability: bytes) -> Vgpu:
    """Return the version and the branch of the record 0, empty ones without it."""
    position = _FIRST_RECORD
    while position + 1 < len(capability) and capability[position] != _DRIVER_RECORD:
        length = capability[position + 1]
        if not length:
            break
        position += length
    data = capability[position + 2 :]
    if len(data) < 2 * _TEXT_BYTES or capability[position] != _DRIVER_RECORD:
        return Vgpu()
    return Vgpu(_text(data[:_TEXT_BYTES]), _text(data[_TEXT_BYTES : 2 * _TEXT_BYTES]))


def _text(data: bytes) -> str:
    return data.strip(b"\0").decode("ascii", "replace")
