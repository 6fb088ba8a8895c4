# SPDX-License-Identifier: Apache-2.0
"""What of NVIDIA's devices and driver a config.json has already, and why; pure.

An engine that uses CDI has added it, or an earlier create.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

from cdi.edits import describe
from cdi.wire import OciConfig
from gpuruntime.cli import explain_reasons
from gpuruntime.cli.explain_reasons import HAS, Reason, Whys
from gpuruntime.discover.search_paths import is_drivers
from gpuruntime.model import Inventory
from gpuruntime.plan.devices import GpuDevice
from gpuruntime.request import parse
from gpuruntime.request.container import MOUNT_ROOT

_NODES = "/dev/nvidia"
_DRM = "/dev/dri/"
_WORD = "nvidia"
_HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart")


def of_config(document: OciConfig, whys: Whys) -> list[Reason]:
    """Return the parts of *document* that are of the driver; *whys* are reasons for some of them.

    *document* has the shape that gpuruntime.oci.bundle checks.
    """
    nodes = list(_nodes(document, whys))
    mounts = list(_mounts(document, whys))
    hooks = list(_hooks(document, whys))
    return [*nodes, *mounts, *hooks]


def gpus_of(document: OciConfig, inventory: Inventory) -> list[Reason]:
    """Return the GPUs and MIG devices of *inventory* whose nodes *document* has."""
    paths = set(_paths(document))
    present = []
    for device in explain_reasons.all_devices(inventory):
        if _granting(device) <= paths and (device.mig or not device.gpu.gpu.mig_enabled):
            why = "the container has its device node" + ("s" if device.mig else "")
            present.append(Reason(f"{HAS} gpu", explain_reasons.described(device), why))
    return present


def _granting(device: GpuDevice) -> set[str]:
    """Return the paths of the nodes without which *device* cannot be used."""
    nodes = [device.gpu.node, *(device.mig[1:] if device.mig else ())]
    return {node.container_path for node in nodes}


def _paths(document: OciConfig) -> Iterator[str]:
    """Yield the paths of all nodes, also of those that are bound in a user namespace."""
    for node in (document.get("linux") or {}).get("devices") or ():
        if isinstance(node.get("path"), str):
            yield node["path"]
    for mount in document.get("mounts") or ():
        destination = mount.get("destination")
        if isinstance(destination, str) and destination.startswith(("/dev/nvidia", _DRM)):
            yield destination


def _nodes(document: OciConfig, whys: Whys) -> Iterator[Reason]:
    nodes = [
        node
        for node in (document.get("linux") or {}).get("devices") or ()
        if isinstance(node.get("path"), str)
    ]
    has_gpu = any(node["path"].startswith(_NODES) for node in nodes)
    for node in nodes:
        path = node["path"]
        why = whys.get(("deviceNodes", path), "")
        if why or path.startswith(_NODES) or (has_gpu and path.startswith(_DRM)):
            numbers = f" {node.get('type')} {node.get('major')}:{node.get('minor')}"
            yield Reason(f"{HAS} device", f"{path}{numbers}", why)


def _mounts(document: OciConfig, whys: Whys) -> Iterator[Reason]:
    for mount in document.get("mounts") or ():
        source, destination = mount.get("source"), mount.get("destination")
        if not (isinstance(source, str) and isinstance(destination, str)):
            continue
        why = whys.get(("mounts", destination), "")
        if destination.startswith(MOUNT_ROOT):
            # A request.
            continue
        if why or _WORD in destination or is_drivers(posixpath.basename(destination)):
            yield Reason(f"{HAS} mount", f"{source} on {destination}", why)


def _hooks(document: OciConfig, whys: Whys) -> Iterator[Reason]:
    hooks: Mapping[str, Any] = document.get("hooks") or {}
    steps = explain_reasons.of_consequences(
        {"hooks": [hook for name in _HOOKS for hook in hooks.get(name) or ()]}
    )
    for name in _HOOKS:
        for hook in hooks.get(name) or ():
            path = hook.get("path")
            key = explain_reasons.key("hooks", hook)
            why = whys.get(key, "")
            if not isinstance(path, str):
                continue
            if why or posixpath.basename(path) in parse.SPEC_HOOKS:
                step = steps.get(key, "")
                sentence = "; ".join(text for text in (step, why) if text)
                what = describe({"hooks": [{"hookName": name, "path": path}]})[0]
                yield Reason(f"{HAS} hook", what.partition(" ")[2], sentence)
