# SPDX-License-Identifier: Apache-2.0
"""What discovery finds on a machine, as plain values.

A host path and a container path are different things even where they are equal; every field says
which of the two it is.
"""

from __future__ import annotations

from gpuruntime.record import Record


class Gpu(Record):
    """A full GPU. *minor* is that of its node /dev/nvidia<minor>; *index* is NVML's order."""

    __slots__ = ("index", "minor", "name", "uuid")

    def __init__(self, *, index: int, uuid: str, minor: int, name: str) -> None:
        self.index = index
        self.uuid = uuid
        self.minor = minor
        self.name = name


class Library(Record):
    """A versioned driver library; *dev_link* is the name of its `.so` link, or ""."""

    __slots__ = ("abi", "container_path", "dev_link", "host_path", "soname")

    def __init__(
        self, *, host_path: str, container_path: str, soname: str, abi: str, dev_link: str = ""
    ) -> None:
        self.host_path = host_path
        self.container_path = container_path
        self.soname = soname
        self.abi = abi
        self.dev_link = dev_link


class Binary(Record):
    """A program of the driver."""

    __slots__ = ("container_path", "host_path")

    def __init__(self, *, host_path: str, container_path: str) -> None:
        self.host_path = host_path
        self.container_path = container_path


class Node(Record):
    """A device node."""

    __slots__ = ("container_path", "host_path")

    def __init__(self, *, host_path: str, container_path: str) -> None:
        self.host_path = host_path
        self.container_path = container_path


class Inventory(Record):
    """One machine: its driver's version and files, its GPUs (gpu, node), its control nodes.

    *problems* are sentences about what was left out and why.
    """

    __slots__ = (
        "binaries",
        "control_nodes",
        "driver_version",
        "gpus",
        "libraries",
        "problems",
    )

    def __init__(
        self,
        *,
        driver_version: str,
        gpus: tuple[tuple[Gpu, Node], ...],
        control_nodes: tuple[Node, ...],
        libraries: tuple[Library, ...],
        binaries: tuple[Binary, ...],
        problems: tuple[str, ...],
    ) -> None:
        self.driver_version = driver_version
        self.gpus = gpus
        self.control_nodes = control_nodes
        self.libraries = libraries
        self.binaries = binaries
        self.problems = problems
