# SPDX-License-Identifier: Apache-2.0
"""Complete device nodes from the host: type, major, minor, mode, and how the container gets them.

On the start path; stats nodes and changes nothing. A node with type and major in the spec is used
unchanged, even if the host has no such node.

In a user namespace no device node can be created, so runc binds the host's node at the
container's path, whatever numbers the config has. If the host had another device at that path, the
container would get that one, without an error.

The result describes the host at this moment. If a node is removed afterwards, the low-level
runtime reports an error; if it is replaced, the cgroup's rule does not allow the new device.
"""

from __future__ import annotations

import _stat as stat
import posix as os

from cdi.edits import has_user_namespace
from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from cdi.wire import DeviceNode, Edits, OciConfig

_TYPES = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}
# The mapping of all ids to themselves: the first user namespace (user_namespaces(7)).
_WHOLE_RANGE = [b"0", b"0", b"4294967295"]


def in_user_namespace(config: OciConfig, uid_map: str = "/proc/self/uid_map") -> bool:
    """Return whether the container of *config* will be in a user namespace, its own or ours.

    *uid_map* is the mapping of this process. The low-level runtime decides by the same rule.
    """
    if has_user_namespace(config):
        return True
    try:
        with open(uid_map, "rb", 0) as lines:
            return lines.read().split() != _WHOLE_RANGE
    except FileNotFoundError:
        # A kernel without user namespaces.
        return False


def complete(
    edits: Edits,
    lstat: Callable[[str], os.stat_result] = os.lstat,
    *,
    user_namespace: bool = False,
) -> Edits:
    """Return *edits* with each device node completed from the host's files, read by *lstat*.

    With *user_namespace*, a node gets `bind` if the host has another device, or none, at the
    container's path. Raises CdiError "host-device-missing", "host-not-a-device" or
    "host-type-mismatch".
    """
    nodes = [_completed(node, lstat) for node in edits.get("deviceNodes") or ()]
    if user_namespace:
        nodes = [_existing(node, lstat) for node in nodes]
    completed = dict(edits)
    completed["deviceNodes"] = nodes
    return completed  # type: ignore[return-value]  # the same members


def _completed(node: DeviceNode, lstat: Callable[[str], os.stat_result]) -> DeviceNode:
    host = node.get("hostPath") or node["path"]
    spec_type = node.get("type", "")
    major = node.get("major", 0)
    is_minimal = bool(spec_type) and (major != 0 or spec_type == "p")
    result = node.copy()
    try:
        # The node itself: a symlink could lead to any device of the host.
        status = lstat(host)
    except (OSError, ValueError) as error:
        if is_minimal:
            return result
        # ValueError: a NUL in the path.
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CdiError("host-device-missing", f'device node "{host}": {why}') from error
    kind = _TYPES.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        if is_minimal:
            return result
        raise CdiError("host-not-a-device", f'"{host}" is not a device node')
    result.setdefault("fileMode", stat.S_IMODE(status.st_mode))
    if is_minimal:
        return result
    if spec_type and spec_type != kind:
        text = f'device node "{host}" is of type "{kind}" where the spec has "{spec_type}"'
        raise CdiError("host-type-mismatch", text)
    result["type"] = kind
    if kind != "p" and major == 0:
        result["major"] = os.major(status.st_rdev)
        result["minor"] = os.minor(status.st_rdev)
    return result


def _existing(node: DeviceNode, lstat: Callable[[str], os.stat_result]) -> DeviceNode:
    """Return the completed *node* for a container in which no node can be created."""
    path = node["path"]
    host = node.get("hostPath") or path
    # Pipes have no numbers: only the path distinguishes two of them.
    if (node["type"] != "p" or path == host) and _is_at(path, node, lstat):
        return node
    if path != host and _is_at(host, node, lstat):
        bound = node.copy()
        bound["bind"] = True
        return bound
    numbers = f"{node['type']} {node.get('major', 0)}:{node.get('minor', 0)}"
    text = f'"{host}" is not device {numbers}, and no node can be created in a user namespace'
    raise CdiError("host-device-missing", text)


def _is_at(path: str, node: DeviceNode, lstat: Callable[[str], os.stat_result]) -> bool:
    """Return whether the host has the device of *node*, which is completed, at *path*."""
    try:
        status = lstat(path)
    except (OSError, ValueError):
        return False
    kind = _TYPES.get(stat.S_IFMT(status.st_mode))
    # "u" is an older word for a character device: mknod(1).
    if kind != node["type"].replace("u", "c"):
        return False
    numbers = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return kind == "p" or numbers == (node.get("major", 0), node.get("minor", 0))
