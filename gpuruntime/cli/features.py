# SPDX-License-Identifier: Apache-2.0
"""The modes of `cdi generate` for nodes other than those of GPUs: storage, network, channels."""

from __future__ import annotations

import re

from cdi.wire import Edits
from gpuruntime import model
from gpuruntime.discover import device_nodes
from gpuruntime.errors import DiscoveryError, RequestError, UnresolvedDeviceError
from gpuruntime.model import Inventory
from gpuruntime.plan import devices, gpu_edits

MODES = (model.GDS, model.MOFED, model.GDRCOPY, model.NVSWITCH, model.IMEX, model.CC)
# Mode → class in the kind of its devices, if it differs from the name of the mode.
_CLASSES = {model.IMEX: "imex-channel"}
_CHANNEL = re.compile(r"(?:channel)?([0-9]{1,9})\Z")
_MAX_CHANNEL = (1 << 20) - 1


def class_of(mode: str) -> str:
    """Return the class of the devices of *mode*."""
    return _CLASSES.get(mode, mode)


def feature_devices(
    mode: str,
    ids: tuple[str, ...],
    inventory: Inventory,
    style: gpu_edits.Style,
    *,
    with_all: bool = True,
) -> list[tuple[str, Edits]]:
    """Return (name, edits) of the devices of *mode*.

    These are the channels *ids* for IMEX, and `all` of them if *with_all*; else only `all`. Raises
    DiscoveryError if there is no device node, RequestError for an invalid id, and
    UnresolvedDeviceError for a channel that does not exist.
    """
    nodes = inventory.features[mode]
    if not nodes:
        patterns = " or ".join(f'"{pattern}"' for pattern in device_nodes.FEATURES[mode])
        raise DiscoveryError(
            f'no device for the mode "{mode}": there is no device node {patterns}',
            'load the kernel module that creates it, or name its directory with "--dev-root"',
        )
    if mode == model.IMEX:
        channels = {_number(node.container_path.rpartition("/")[2]): node for node in nodes}
        numbers = list(channels) if devices.ALL in ids else [_number(name) for name in ids]
        named = [
            (str(number), gpu_edits.node_edits([_channel(number, channels)], style))
            for number in dict.fromkeys(numbers)
        ]
        if with_all:
            named.append((devices.ALL, gpu_edits.merged(edits for _, edits in named)))
        return named
    edits = gpu_edits.node_edits(nodes, style)
    if mode == model.GDS and inventory.gds_files:
        edits["mounts"] = [
            {
                "hostPath": file.host_path,
                "containerPath": file.container_path,
                "options": list(gpu_edits.MOUNT_OPTIONS),
            }
            for file in inventory.gds_files
        ]
    return [(devices.ALL, edits)]


def feature_edits() -> Edits:
    """Return the edits of every container with one of these devices."""
    return {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}


def _number(name: str) -> int:
    match = _CHANNEL.match(name)
    if match is None:
        raise RequestError(
            f'invalid channel ID "{name}"', 'name channels by number with "--device-id", or "all"'
        )
    if int(match[1]) > _MAX_CHANNEL:
        raise RequestError(
            f"invalid channel ID {match[1]}: must be in the range [0, {_MAX_CHANNEL}]",
            "name a channel in that range",
        )
    return int(match[1])


def _channel(number: int, channels: dict[int, model.Node]) -> model.Node:
    if number not in channels:
        raise UnresolvedDeviceError(
            f'IMEX channel {number} not found at "{device_nodes.CHANNELS}/channel{number}"',
            f"name one that exists: {', '.join(map(str, channels))}",
        )
    return channels[number]
