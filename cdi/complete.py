# SPDX-License-Identifier: Apache-2.0
"""Complete device edits from the host: type, major, minor, mode.

On the start path; stats nodes and changes nothing on the machine. A node given with its type and
major is taken as it stands, also where the host has no such node.
"""

from __future__ import annotations

import os
import stat

from cdi.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from cdi.wire import DeviceNode, Edits

_TYPES = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}


def complete(edits: Edits, lstat: Callable[[str], os.stat_result] = os.lstat) -> Edits:
    """Return *edits* with each device node completed by what *lstat* tells of the host.

    Raises CdiError "host-device-missing", "host-not-a-device" or "host-type-mismatch".
    """
    completed = dict(edits)
    completed["deviceNodes"] = [_completed(node, lstat) for node in edits.get("deviceNodes") or ()]
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
