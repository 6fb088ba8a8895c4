# SPDX-License-Identifier: Apache-2.0
"""Shapes of CDI documents, for type checkers only: nothing imports this at run time."""

from __future__ import annotations

from typing import Any, TypedDict


class DeviceNode(TypedDict, total=False):
    """CDI SPEC.md, "deviceNodes"."""

    path: str
    hostPath: str
    type: str
    major: int
    minor: int
    fileMode: int
    permissions: str
    uid: int
    gid: int
    # Not part of the format: `cdi.complete` sets it if hostPath must be bind mounted on path.
    bind: bool


class Mount(TypedDict, total=False):
    """CDI SPEC.md, "mounts"."""

    hostPath: str
    containerPath: str
    options: list[str]
    type: str


class Hook(TypedDict, total=False):
    """CDI SPEC.md, "hooks"."""

    hookName: str
    path: str
    args: list[str]
    env: list[str]
    timeout: int


class NetDevice(TypedDict, total=False):
    """CDI SPEC.md, "netDevices"."""

    hostInterfaceName: str
    name: str


class Edits(TypedDict, total=False):
    """CDI SPEC.md, "containerEdits"."""

    env: list[str]
    deviceNodes: list[DeviceNode]
    netDevices: list[NetDevice]
    hooks: list[Hook]
    mounts: list[Mount]
    intelRdt: dict[str, Any] | None
    additionalGids: list[int]


class Device(TypedDict, total=False):
    """CDI SPEC.md, "devices"."""

    name: str
    annotations: dict[str, str]
    containerEdits: Edits


class Spec(TypedDict, total=False):
    """A whole document."""

    cdiVersion: str
    kind: str
    annotations: dict[str, str]
    devices: list[Device]
    containerEdits: Edits


OciConfig = dict[str, Any]
