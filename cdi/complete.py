# SPDX-License-Identifier: Apache-2.0
"""Complete device nodes from the host: type, major, minor, mode, and how the container gets them.

On the start path; stats nodes and changes nothing. A node whose type and major are given is taken
as it is, even if the host has no such node.

In a user namespace nobody can create a device node, so runc binds the host's node at the
container's path, whatever numbers the config has. If the host had another device at that path, the
container would get that one, without an error.

What is written is what was seen here. A node that is removed afterwards is an error of the
low-level runtime; one that is replaced is not what the cgroup's rule allows.
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
# The identity of all ids: the first user namespace (user_namespaces(7)).
_WHOLE_RANGE = [b"0", b"0", b"4294967295"]


def in_user_namespace(config: OciConfig, uid_map: str = "/proc/self/uid_map") -> bool:
    """Return whether the container of *config* will be in a user namespace, its own or ours.

    *uid_map* tells of ours. The rule is the low-level runtime's own: it decides as well.
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
    """Return *edits* with each device node completed by what *lstat* tells of the host.

    With *user_namespace* a node gets `bind` where the host has another device, or none, at the
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
    given = node.get("type", "")
    major = node.get("major", 0)
    is_minimal = bool(given) and (major != 0 or given == "p")
    result = node.copy()
    try:
        # The node itself: a link here could name any device of the host.
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
    if given and given != kind:
        text = f'device node "{host}" is of type "{kind}" where the spec has "{given}"'
        raise CdiError("host-type-mismatch", text)
    result["type"] = kind
    if kind != "p" and major == 0:
        result["major"] = os.major(status.st_rdev)
        result["minor"] = os.minor(status.st_rdev)
    return result


def _existing(node: DeviceNode, lstat: Callable[[str], os.stat_result]) -> DeviceNode:
    """Return the completed *node* as it can be given where no node can be made."""
    path = node["path"]
    host = node.get("hostPath") or path
    # Two pipes have the same numbers, none: only the path tells which one is meant.
    if (node["type"] != "p" or path == host) and _is_at(path, node, lstat):
        return node
    if path != host and _is_at(host, node, lstat):
        bound = node.copy()
        bound["bind"] = True
        return bound
    numbers = f"{node['type']} {node.get('major', 0)}:{node.get('minor', 0)}"
    text = f'"{host}" is no device {numbers}, and in a user namespace none can be made'
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
