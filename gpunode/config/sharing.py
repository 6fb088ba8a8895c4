# SPDX-License-Identifier: Apache-2.0
"""How the resources of a node are shared: the section `sharing` of the config file, checked."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from cdi import document
from gpunode.config.file import ConfigFile, Path

DEFAULT_DOMAIN = "nvidia.com"
SHARED_SUFFIX = ".shared"
MAX_NAME = 63
# A DNS subdomain, as Kubernetes checks the domain of a resource; its name has the same form here.
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*\Z")


class SharingKind(enum.Enum):
    """How the containers of one GPU share it; the values are keys of the config file."""

    TIME_SLICING = "timeSlicing"
    MPS = "mps"


@dataclass(frozen=True, slots=True)
class SharedResource:
    """One entry of the list: devices of the resource *name* are offered *replicas* times each.

    *new_name* is the resource that their units belong to. *count* limits the devices to the first
    ones; *devices* are indices, `0` or `0:1`, and UUIDs; None means no limit.
    """

    name: str
    new_name: str
    replicas: int
    count: int | None = None
    devices: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """The way of sharing, and the resources that are shared."""

    kind: SharingKind
    resources: tuple[SharedResource, ...]
    fail_requests_greater_than_one: bool = True


def sharing(file: ConfigFile) -> Sharing | None:
    """Return the sharing of *file*, None if nothing is shared; raise ConfigError."""
    section: dict[str, Any] = file.get(("sharing",)) or {}
    if len(section) > 1:
        raise file.error(
            ("sharing", SharingKind.MPS.value),
            '"sharing.timeSlicing" and "sharing.mps" exclude each other',
            "remove one of them",
        )
    for kind in SharingKind:
        if kind.value in section:
            return _of_kind(kind, section[kind.value], file)
    return None


def _of_kind(kind: SharingKind, section: dict[str, Any], file: ConfigFile) -> Sharing | None:
    place: Path = ("sharing", kind.value, "resources")
    resources = [
        _resource(entry, (*place, i), file, is_renamed=section.get("renameByDefault", False))
        for i, entry in enumerate(section["resources"])
    ]
    _check_overlap(resources, place, file)
    # One replica is the device itself.
    shared = tuple(resource for resource in resources if resource.replicas > 1)
    if not shared:
        return None
    return Sharing(kind, shared, section.get("failRequestsGreaterThanOne", True))


def _resource(
    entry: dict[str, Any], place: Path, file: ConfigFile, *, is_renamed: bool
) -> SharedResource:
    name = _resource_name(entry["name"], (*place, "name"), file)
    new_name = name
    if "rename" in entry:
        new_name = _resource_name(entry["rename"], (*place, "rename"), file)
    elif is_renamed:
        new_name = _resource_name(f"{name}{SHARED_SUFFIX}", (*place, "name"), file)
    devices = entry.get("devices", "all")
    return SharedResource(
        name=name,
        new_name=new_name,
        replicas=int(entry["replicas"]),
        count=None if isinstance(devices, (str, list)) else int(devices),
        devices=tuple(map(_device, devices)) if isinstance(devices, list) else None,
    )


def _device(name: str | float) -> str:
    return name if isinstance(name, str) else str(int(name))


def _resource_name(text: str, place: Path, file: ConfigFile) -> str:
    """Return the resource name *text* with its domain; raise ConfigError if it is not valid."""
    name = text if "/" in text else f"{DEFAULT_DOMAIN}/{text}"
    where = document.place(place)
    if len(name) > MAX_NAME:
        problem = f'"{where}" is "{name}", {len(name)} characters long'
        raise file.error(place, problem, f"use at most {MAX_NAME} characters with the domain")
    domain, _, base = name.partition("/")
    if not _SUBDOMAIN.match(domain) or not _SUBDOMAIN.match(base):
        hint = 'use lower-case letters, digits, "-" and ".", such as "nvidia.com/gpu"'
        raise file.error(place, f'"{where}" is "{text}", not the name of a resource', hint)
    return name


def _check_overlap(resources: list[SharedResource], place: Path, file: ConfigFile) -> None:
    """Raise ConfigError if two entries for one resource may select the same device."""
    seen: dict[str, set[str]] = {}
    for i, resource in enumerate(resources):
        names = set(resource.devices) if resource.devices is not None else None
        earlier = seen.get(resource.name)
        if earlier is not None and (names is None or not earlier or earlier & names):
            problem = f'two entries share devices of "{resource.name}"'
            hint = 'list different "devices" in each of them'
            raise file.error((*place, i, "name"), problem, hint)
        seen[resource.name] = (earlier or set()) | (names or set())
