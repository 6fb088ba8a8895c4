# SPDX-License-Identifier: Apache-2.0
"""An inventory → the container edits that give a container its driver and GPUs; pure."""

from __future__ import annotations

import posixpath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdi.wire import DeviceNode, Edits, Hook, Mount
    from gpuruntime.model import Binary, Inventory, Library, Node

HOOK_NAME = "gpu-cdi-hook"
# Consumers written in Go lose an empty list, and runc before 1.3 then runs the hook with the
# image's environment (CVE-2025-23266).
HOOK_ENV = ("GPURUNTIME_HOOK=1",)
HOOK_TIMEOUT_S = 30
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")


def common_edits(inventory: Inventory, hook_path: str) -> Edits:
    """Return what every container with the driver gets, whichever GPUs it has."""
    files: list[Library | Binary] = [*inventory.libraries, *inventory.binaries]
    mounts = sorted(
        (_mount(item) for item in files),
        key=lambda m: (m["containerPath"].count("/"), m["containerPath"]),
    )
    return {
        # Whoever finds it knows that the driver is in place already.
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [_node(node) for node in inventory.control_nodes],
        "mounts": mounts,
        "hooks": [_hook(inventory.libraries, hook_path)],
    }


def devices(inventory: Inventory) -> list[tuple[str, Edits]]:
    """Return (name, edits) of each GPU by index and by UUID, and of `all`."""
    named: list[tuple[str, Edits]] = []
    for gpu, node in inventory.gpus:
        edits: Edits = {"deviceNodes": [_node(node)]}
        named += [(str(gpu.index), edits), (gpu.uuid, edits)]
    every: Edits = {"deviceNodes": [_node(node) for _, node in inventory.gpus]}
    return [*named, ("all", every)] if named else []


def _node(node: Node) -> DeviceNode:
    # No type, numbers or mode: consumers read them from the host, where majors move between boots.
    edit: DeviceNode = {"path": node.container_path}
    if node.host_path != node.container_path:
        edit["hostPath"] = node.host_path
    edit["permissions"] = "rw"
    return edit


def _mount(item: Library | Binary) -> Mount:
    return {
        "hostPath": item.host_path,
        "containerPath": item.container_path,
        "options": list(MOUNT_OPTIONS),
    }


def _hook(libraries: Iterable[Library], path: str) -> Hook:
    args = [HOOK_NAME, "update-container"]
    for link in links(libraries):
        args += ["--link", link]
    for library in libraries:
        args += ["--library", f"{library.soname}::{library.container_path}::{library.abi}"]
    return {
        "hookName": "createContainer",
        "path": path,
        "args": [*args, "--mask-params"],
        "env": list(HOOK_ENV),
        "timeout": HOOK_TIMEOUT_S,
    }


def links(libraries: Iterable[Library]) -> list[str]:
    """Return `TARGET::LINK` for the SONAME link and the `.so` link of each library, each once."""
    found: dict[str, None] = {}
    for library in libraries:
        directory, name = posixpath.split(library.container_path)
        if library.soname != name:
            found[f"{name}::{directory}/{library.soname}"] = None
        if library.dev_link:
            found[f"{library.soname}::{directory}/{library.dev_link}"] = None
    return list(found)
