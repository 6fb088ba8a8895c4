# SPDX-License-Identifier: Apache-2.0
"""Check a decoded CDI document: members, types, values, version; the first complaint ends it.

On the start path; pure. CDI SPEC.md, "CDI JSON Specification"; the order of the checks is that of
the reference library, so that both name the same reason.
"""

from __future__ import annotations

from cdi import names, version
from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cdi.wire import Edits, Spec

HOOK_NAMES = (
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
)
_UINT32 = (0, 2**32 - 1)
_INT64 = (-(2**63), 2**63 - 1)
# What readers in Go have in place of a null item; of the other shapes a null item crashes them.
_NULL_ITEMS: dict[Any, Any] = {str: "", "device": {}, _UINT32: 0}

# Member → shape. A shape is str, bool, (low, high) for an integer, [shape] for a list of it, the
# name of another table, or dict for a map of strings.
_TABLES: dict[str, dict[str, Any]] = {
    "spec": {
        "cdiVersion": str,
        "kind": str,
        "annotations": dict,
        "devices": ["device"],
        "containerEdits": "edits",
    },
    "device": {"name": str, "annotations": dict, "containerEdits": "edits"},
    "edits": {
        "env": [str],
        "deviceNodes": ["node"],
        "netDevices": ["net device"],
        "hooks": ["hook"],
        "mounts": ["mount"],
        "intelRdt": "rdt",
        "additionalGids": [_UINT32],
    },
    "node": {
        "path": str,
        "hostPath": str,
        "type": str,
        "major": _INT64,
        "minor": _INT64,
        "fileMode": _UINT32,
        "permissions": str,
        "uid": _UINT32,
        "gid": _UINT32,
    },
    "mount": {"hostPath": str, "containerPath": str, "options": [str], "type": str},
    "hook": {"hookName": str, "path": str, "args": [str], "env": [str], "timeout": _INT64},
    "net device": {"hostInterfaceName": str, "name": str},
    "rdt": {
        "closID": str,
        "l3CacheSchema": str,
        "memBwSchema": str,
        "schemata": [str],
        "enableMonitoring": bool,
    },
}


def check(document: object) -> Spec:
    """Return *document*, typed, without its null members; raise CdiError if it is refused."""
    if document is None:
        raise CdiError("no-data", "the document is empty")
    spec: Spec = _shape("spec", document, "")
    _check_version(spec)
    vendor, cls = names.split_kind(spec.get("kind", ""))
    names.check_vendor(vendor)
    names.check_class(cls)
    _check_edits(spec.get("containerEdits") or {}, "containerEdits")
    seen: set[str] = set()
    for device in spec.get("devices", ()):
        name = device.get("name", "")
        names.check_device(name)
        where = f'device "{name}"'
        if is_empty(device.get("containerEdits") or {}):
            raise CdiError("empty-edits", f"{where} has no edits")
        _check_edits(device["containerEdits"], where)
        if name in seen:
            raise CdiError("duplicate-device", f"{where} is there twice")
        seen.add(name)
    if not seen:
        raise CdiError("no-devices", "the document has no devices")
    return spec


def is_empty(edits: Edits) -> bool:
    """Tell whether *edits* would change nothing (an empty intelRdt counts as an edit)."""
    if edits.get("intelRdt") is not None:
        return False
    lists = ("env", "deviceNodes", "hooks", "mounts", "additionalGids", "netDevices")
    return not any(edits.get(member) for member in lists)


def _shape(shape: Any, value: object, where: str) -> Any:  # noqa: ANN401 (JSON)
    """Return *value* if it has *shape*, null members dropped; raise CdiError otherwise."""
    if isinstance(shape, str):
        return _members(shape, value, where)
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise CdiError("wrong-type", f"{where} is not a list")
        null = _NULL_ITEMS.get(shape[0])
        items = [null if item is None else item for item in value]
        return [_shape(shape[0], item, f"{where}[{i}]") for i, item in enumerate(items)]
    if isinstance(shape, tuple):
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        # bool is a subclass of int in Python and something else in JSON.
        if not isinstance(value, int) or isinstance(value, bool):
            raise CdiError("wrong-type", f"{where} is not a whole number")
        if not shape[0] <= value <= shape[1]:
            raise CdiError("wrong-type", f"{where} is out of range: {value}")
        return value
    if not isinstance(value, shape):
        kinds = {str: "a string", bool: "true or false", dict: "a map"}
        raise CdiError("wrong-type", f"{where} is not {kinds[shape]}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, str):
                raise CdiError("wrong-type", f'{where} "{key}" is not a string')
    return value


def _members(table: str, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CdiError("wrong-type", f"{where or 'the document'} is not an object")
    members = _TABLES[table]
    prefix = f"{where}." if where else ""
    result = {}
    for key, item in value.items():
        if key not in members:
            raise CdiError("unknown-field", f'{where or "the document"} has no member "{key}"')
        if item is not None:
            result[key] = _shape(members[key], item, prefix + key)
    return result


def _check_version(spec: Spec) -> None:
    text = spec.get("cdiVersion", "")
    claimed = text.removeprefix("v")
    if claimed not in version.KNOWN:
        raise CdiError("version-unknown", f'cdiVersion "{text}" is not known')
    needed = version.minimum(spec)
    if version.KNOWN.index(claimed) < version.KNOWN.index(needed):
        raise CdiError("version-too-low", f"cdiVersion {claimed}, but {needed} is needed")


def _check_env(category: str, env: list[str], where: str) -> None:
    for entry in env:
        if entry.find("=") < 1:
            raise CdiError(category, f'{where}: "{entry}" is not NAME=value')


def _check_edits(edits: Edits, where: str) -> None:
    _check_env("env", edits.get("env", []), where)
    for node in edits.get("deviceNodes", ()):
        if not node.get("path"):
            raise CdiError("device-path", f"{where}: a device node has no path")
        if node.get("type", "") not in ("", "b", "c", "u", "p"):
            raise CdiError("device-type", f'{where}: type "{node["type"]}" of {node["path"]}')
        permissions = node.get("permissions", "")
        if permissions != "none" and permissions.strip("rwm"):
            raise CdiError("device-permissions", f'{where}: permissions "{permissions}"')
    for hook in edits.get("hooks", ()):
        if hook.get("hookName", "") not in HOOK_NAMES:
            raise CdiError("hook-name", f'{where}: "{hook.get("hookName", "")}" is no hook')
        if not hook.get("path"):
            raise CdiError("hook-path", f"{where}: a hook has no path")
        _check_env("hook-env", hook.get("env", []), where)
    for mount in edits.get("mounts", ()):
        if not mount.get("hostPath"):
            raise CdiError("mount-host-path", f"{where}: a mount has no hostPath")
        if not mount.get("containerPath"):
            raise CdiError("mount-container-path", f"{where}: a mount has no containerPath")
    _check_clos_id((edits.get("intelRdt") or {}).get("closID", ""), where)
    _check_net_devices(edits, where)


def _check_clos_id(clos_id: str, where: str) -> None:
    if clos_id == "/":
        return
    if len(clos_id.encode("utf-8", "surrogatepass")) >= 4096:
        raise CdiError("rdt-clos-id", f"{where}: closID is too long")
    if clos_id in (".", "..") or "/" in clos_id or "\n" in clos_id:
        raise CdiError("rdt-clos-id", f'{where}: closID "{clos_id}"')


def _check_net_devices(edits: Edits, where: str) -> None:
    hosts: set[str] = set()
    inside: set[str] = set()
    for device in edits.get("netDevices", ()):
        host, name = device.get("hostInterfaceName", ""), device.get("name", "")
        if not host:
            raise CdiError("netdev-host-name", f"{where}: a network device has no host name")
        if not name:
            raise CdiError("netdev-name", f"{where}: a network device has no name")
        if host in hosts:
            raise CdiError("netdev-duplicate-host", f'{where}: network device "{host}" twice')
        if name in inside:
            raise CdiError("netdev-duplicate-name", f'{where}: network name "{name}" twice')
        hosts.add(host)
        inside.add(name)
