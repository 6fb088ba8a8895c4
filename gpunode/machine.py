# SPDX-License-Identifier: Apache-2.0
"""Read what labels say of the machine itself: its product name, PCI classes, virtual GPUs."""

from __future__ import annotations

import os

from gpunode import vgpu
from gpunode.labels import Machine, Vgpu

PRODUCT_FILE = "/sys/class/dmi/id/product_name"
_NVIDIA = "0x10de"
# PCI base class of displays.
_DISPLAY = 0x03
_MAX_BYTES = 4096


def read(product_file: str = PRODUCT_FILE, sys: str = "/sys") -> Machine:
    """Return the facts of the machine; what cannot be read is missing."""
    classes: dict[str, int] = {}
    found: Vgpu | None = None
    directory = f"{sys}/bus/pci/devices"
    try:
        addresses = sorted(os.listdir(directory))
    except OSError:
        addresses = []
    for address in addresses:
        device = f"{directory}/{address}"
        if _text(f"{device}/vendor") != _NVIDIA:
            continue
        try:
            number = int(_text(f"{device}/class"), 16) >> 8
        except ValueError:
            continue
        if number >> 8 == _DISPLAY:
            classes[address] = number
            found = found or vgpu.of_config_space(_bytes(f"{device}/config"))
    return Machine(_text(product_file), classes, found)


def _text(path: str) -> str:
    return _bytes(path).decode("utf-8", "replace").strip()


def _bytes(path: str) -> bytes:
    try:
        # O_NONBLOCK: a FIFO in the place of a file must not block us.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            return stream.read(_MAX_BYTES)
    except OSError:
        return b""
