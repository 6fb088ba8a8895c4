# SPDX-License-Identifier: Apache-2.0
"""Describe the failure for a requested device node that the host does not have.

Loaded only when a create fails; reads only. The hint depends on the origin of the node: a node of
the driver must be created, a CDI spec of an earlier state of the host must be regenerated.
"""

from __future__ import annotations

import os

from gpuruntime import remedies
from gpuruntime.errors import UnresolvedDeviceError
from gpuruntime.request import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from cdi.errors import CdiError
    from cdi.registry import Registry, SpecFile
    from cdi.wire import DeviceNode, Edits
    from gpuruntime.config import Config
    from gpuruntime.request.parse import Request


def error(
    failure: CdiError,
    edits: Edits,
    request: Request,
    config: Config,
    read_specs: Callable[[], Registry],
) -> UnresolvedDeviceError:
    """Return the error for *failure*, which is about a device node of *edits*."""
    text = f"cannot give a device to the container: {failure}"
    for node in edits.get("deviceNodes") or ():
        if f'"{_host_path(node)}"' in failure.message:
            return UnresolvedDeviceError(text, _action(node, request, config, read_specs))
    return UnresolvedDeviceError(text)


def _action(
    node: DeviceNode, request: Request, config: Config, read_specs: Callable[[], Registry]
) -> str:
    """Return the hint: the action that makes *node* usable for a container."""
    path, host, root = _host_path(node), remedies.LiveHost(), config.driver_root
    exists = os.path.lexists(path)
    if exists and (request.is_automatic or not node.get("major")):
        return remedies.foreign_node(host, path, root)
    if request.is_automatic:
        return remedies.missing_spec_node(host, path, driver_root=root)
    specs = read_specs()
    spec, kind = "", config.default_kind or None
    for name in request.devices:
        file = specs.find(name)
        if file is not None and _has_node(file, path):
            spec = file.path
            kind = name.partition("=")[0] if parse.is_ours(name, config) else None
    if exists:
        # The spec has the numbers of an earlier boot.
        return remedies.stale_spec(spec, kind)
    return remedies.missing_spec_node(host, path, spec, kind, root)


def _host_path(node: DeviceNode) -> str:
    return node.get("hostPath") or node["path"]


def _has_node(file: SpecFile, path: str) -> bool:
    """Return whether the spec *file* names the device node *path*."""
    assert file.spec is not None
    parts: list[Any] = [file.spec, *file.devices.values()]
    return any(
        _host_path(node) == path
        for part in parts
        for node in (part.get("containerEdits") or {}).get("deviceNodes") or ()
    )
