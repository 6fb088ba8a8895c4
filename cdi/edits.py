# SPDX-License-Identifier: Apache-2.0
"""Container edits: collect those of a request and apply them to an OCI config; pure.

On the start path. CDI SPEC.md, "containerEdits"; for the OCI side, config.md and config-linux.md.
A node's type and numbers, which only the host knows, are completed before `apply`.
"""

from __future__ import annotations

from cdi import pathnames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from cdi.wire import DeviceNode, Edits, Mount, OciConfig

# Stages at which low-level runtimes start a hook without env with the image's variables.
WITH_IMAGE = ("createContainer", "startContainer")
_LISTS = ("env", "deviceNodes", "netDevices", "mounts", "hooks", "additionalGids")


def merge(parts: Iterable[Edits]) -> Edits:
    """Return all *parts* as one: lists concatenated in order, the last intelRdt as a whole."""
    merged: dict[str, Any] = {member: [] for member in _LISTS}
    for part in parts:
        for member in _LISTS:
            merged[member].extend(part.get(member) or ())
        if part.get("intelRdt") is not None:
            merged["intelRdt"] = part["intelRdt"]
    return merged  # type: ignore[return-value]  # a dict of exactly these members


def describe(edits: Edits) -> list[str]:
    """Return one line for each of *edits*."""
    return [
        *(f"env {entry}" for entry in edits.get("env") or ()),
        *(_describe_node(node) for node in edits.get("deviceNodes") or ()),
        *(f"net device {item['hostInterfaceName']}" for item in edits.get("netDevices") or ()),
        *(f"mount {m['hostPath']} on {m['containerPath']}" for m in edits.get("mounts") or ()),
        *(f"hook {hook['hookName']} {hook['path']}" for hook in edits.get("hooks") or ()),
        *(f"group {gid}" for gid in edits.get("additionalGids") or ()),
    ]


def has_user_namespace(config: OciConfig) -> bool:
    """Return whether *config* requests a user namespace, a new or an existing one."""
    namespaces = (config.get("linux") or {}).get("namespaces") or ()
    return any(item.get("type") == "user" for item in namespaces)


def allows_all(config: OciConfig) -> bool:
    """Return whether the device rules of *config* let the container use every character device.

    `--privileged` sets such rules; the container then has every GPU. Their order counts.
    """
    allowed: set[str] = set()
    for rule in ((config.get("linux") or {}).get("resources") or {}).get("devices") or ():
        kind = rule.get("type") or "a"
        if kind == "a":
            # All devices, whatever numbers and access the rule has: cgroup-v1/devices.rst.
            allowed = {"r", "w"} if rule.get("allow") else set()
        elif kind == "c":
            access = set(str(rule.get("access") or "rwm"))
            if not rule.get("allow"):
                # A rule that denies one device is enough: not every device is allowed.
                allowed -= access
            elif all(rule.get(number) in (None, -1) for number in ("major", "minor")):
                allowed |= access
    return allowed >= {"r", "w"}


def _describe_node(node: DeviceNode) -> str:
    words = ["device", node["path"]]
    if node.get("bind"):
        words.append("bound")
    if node.get("hostPath", node["path"]) != node["path"]:
        words += ["from", node["hostPath"]]
    if "type" in node:
        words += [node["type"], f"{node.get('major', 0)}:{node.get('minor', 0)}"]
    return " ".join([*words, node.get("permissions") or "rwm"])


def apply(edits: Edits, config: OciConfig) -> None:
    """Apply completed *edits* to *config* in place; sections are made only when needed."""
    if edits.get("env"):
        process = _section(config, "process")
        process["env"] = _merged_env(process.get("env") or [], edits["env"])
    user = (config.get("process") or {}).get("user") or {}
    if edits.get("deviceNodes"):
        _apply_nodes(edits["deviceNodes"], user, config)
    for device in edits.get("netDevices") or ():
        network = _section(_section(config, "linux"), "netDevices")
        network[device["hostInterfaceName"]] = {"name": device["name"]}
    is_mapped = has_user_namespace(config)
    mounts = [_bind(node) for node in edits.get("deviceNodes") or () if node.get("bind")]
    mounts += [_mount(edit, is_mapped=is_mapped) for edit in edits.get("mounts") or ()]
    if mounts:
        _apply_mounts(mounts, config)
    for hook in edits.get("hooks") or ():
        members = ("path", "args", "env", "timeout")
        _list(_section(config, "hooks"), hook["hookName"]).append(
            {m: hook[m] for m in members if m in hook}  # type: ignore[literal-required]
        )
    rdt = edits.get("intelRdt")
    if rdt is not None:
        _section(config, "linux")["intelRdt"] = {k: v for k, v in rdt.items() if v}
    for gid in edits.get("additionalGids") or ():
        # 0 may stand for a missing value, and every root process has that group anyway.
        if gid:
            gids = _list(_section(_section(config, "process"), "user"), "additionalGids")
            if gid not in gids:
                gids.append(gid)


def _section(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object *name* of *parent*, made if it is missing or null."""
    if parent.get(name) is None:
        parent[name] = {}
    section: dict[str, Any] = parent[name]
    return section


def _list(parent: dict[str, Any], name: str) -> list[Any]:
    """Return the list *name* of *parent*, made if it is missing or null."""
    if parent.get(name) is None:
        parent[name] = []
    items: list[Any] = parent[name]
    return items


def _merged_env(env: list[str], edits: list[str]) -> list[str]:
    """Return *env* with *edits* replaced in place by name (the last of repeats) or appended."""
    merged = list(env)
    position = {entry.partition("=")[0]: i for i, entry in enumerate(merged)}
    for entry in edits:
        name = entry.partition("=")[0]
        if name in position:
            merged[position[name]] = entry
        else:
            position[name] = len(merged)
            merged.append(entry)
    return merged


def _apply_nodes(nodes: list[DeviceNode], user: dict[str, Any], config: OciConfig) -> None:
    """Write *nodes* to linux.devices, and for each device its rule to linux.resources.devices.

    A node to bind gets only the rule, and existing entries of its path are removed: low-level
    runtimes create devices after mounts, so that an entry would hide the mount.
    """
    linux = _section(config, "linux")
    devices = _list(linux, "devices")
    slots: list[Any] = list(devices)
    places = _places(devices, "path")
    for node in nodes:
        _apply_rule(node, linux)
        if node.get("bind"):
            path = pathnames.normpath(node["path"])
            slots = [None if _is_device_at(path, item) else item for item in slots]
            continue
        device = _device(node, user)
        same = places.setdefault(node["path"], [])
        if same:
            slots[same.pop(0)] = None
        if same:
            slots[same[0]] = device
        else:
            same.append(len(slots))
            slots.append(device)
    devices[:] = [device for device in slots if device is not None]


def _is_device_at(path: str, device: dict[str, Any] | None) -> bool:
    """Return whether the entry *device* of linux.devices is at the normalised *path*."""
    written = (device or {}).get("path")
    return isinstance(written, str) and pathnames.normpath(written) == path


def _places(items: list[Any], member: str) -> dict[str, list[int]]:
    """Return value of *member* → indices of the *items* with that value, in order."""
    places: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        if isinstance(item.get(member), str):
            places.setdefault(item[member], []).append(i)
    return places


def _device(node: DeviceNode, user: dict[str, Any]) -> dict[str, Any]:
    members = ("path", "type", "major", "minor", "fileMode", "uid", "gid")
    device: dict[str, Any] = {m: value for m, value in node.items() if m in members}
    for member in ("uid", "gid"):
        # Without an owner, the device belongs to the container's user, who can then open it.
        if member not in device and user.get(member, 0) > 0:
            device[member] = user[member]
    return device


def _apply_rule(node: DeviceNode, linux: dict[str, Any]) -> None:
    if node["type"] in ("b", "c"):
        # Always both numbers: a rule without a minor allows every device of the major.
        rule: dict[str, Any] = {
            "allow": True,
            "type": node["type"],
            "major": node.get("major", 0),
            "minor": node.get("minor", 0),
        }
        permissions = node.get("permissions") or "rwm"
        if permissions != "none":
            rule["access"] = permissions
        _list(_section(linux, "resources"), "devices").append(rule)


def _bind(node: DeviceNode) -> dict[str, Any]:
    """Return the bind mount of the host's own *node*."""
    # Not idmapped, which devtmpfs does not support. A nested user namespace may not clear flags
    # of the mount of the host's /dev, usually these two: mount_namespaces(7), "locked".
    return {
        "destination": node["path"],
        "source": node["hostPath"],
        "options": ["rbind", "rprivate", "nosuid", "noexec"],
    }


def _mount(edit: Mount, *, is_mapped: bool) -> dict[str, Any]:
    """Return the OCI mount of *edit*; *is_mapped* is true if the container has id mappings."""
    mount: dict[str, Any] = {"destination": edit["containerPath"], "source": edit["hostPath"]}
    if edit.get("type"):
        mount["type"] = edit["type"]
    options = list(edit.get("options") or ())
    if is_mapped:
        options += _idmap_option(edit.get("type", ""), options)
    if options:
        mount["options"] = options
    return mount


def _apply_mounts(added: list[dict[str, Any]], config: OciConfig) -> None:
    """Replace mounts of the same destination, then sort all by depth with a stable sort."""
    mounts = _list(config, "mounts")
    slots: list[Any] = list(mounts)
    places = _places(mounts, "destination")
    for mount in added:
        same = places.setdefault(mount["destination"], [])
        if same:
            slots[same.pop(0)] = None
        same.append(len(slots))
        slots.append(mount)
    mounts[:] = [mount for mount in slots if mount is not None]
    mounts.sort(key=lambda item: pathnames.normpath(item.get("destination") or ".").count("/"))


def _idmap_option(kind: str, options: list[str]) -> list[str]:
    """Return the option that makes a bind mount follow the container's id mappings."""
    option = "idmap" if kind == "bind" else ""
    for item in options:
        if item in ("idmap", "ridmap"):
            return []
        if item in ("bind", "rbind"):
            option = "idmap" if item == "bind" else "ridmap"
    return [option] if option else []
