# SPDX-License-Identifier: Apache-2.0
"""Complete device edits from the host: type, major, minor, mode.

On the start path; stats nodes and changes nothing on the machine. CDI: a node given with its type
and major is taken as it stands.
"""

from __future__ import annotations

import os
import stat

from gpuruntime.errors import UnresolvedDeviceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cdi.wire import DeviceNode, Edits

_TYPES = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}


def complete(edits: Edits) -> Edits:
    """Return *edits* with each device node completed; raise UnresolvedDeviceError."""
    completed = dict(edits)
    completed["deviceNodes"] = [_completed(node) for node in edits.get("deviceNodes") or ()]
    return completed  # type: ignore[return-value]  # the same members


def _completed(node: DeviceNode) -> DeviceNode:
    host = node.get("hostPath") or node["path"]
    given = node.get("type", "")
    major = node.get("major", 0)
    is_minimal = bool(given) and (major != 0 or given == "p")
    result = node.copy()
    try:
        # The node itself: a link here could name any device of the host.
        status = os.lstat(host)
    except OSError as error:
        if is_minimal:
            return result
        raise _unusable(host, error.strerror or "?") from error
    kind = _TYPES.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        if is_minimal:
            return result
        raise _unusable(host, "not a device node")
    result.setdefault("fileMode", stat.S_IMODE(status.st_mode))
    if is_minimal:
        return result
    if given and given != kind:
        raise _unusable(host, f'type "{kind}" where the CDI spec has "{given}"')
    result["type"] = kind
    if kind != "p" and major == 0:
        result["major"] = os.major(status.st_rdev)
        result["minor"] = os.minor(status.st_rdev)
    return result


def _unusable(host: str, why: str) -> UnresolvedDeviceError:
    return UnresolvedDeviceError(
        f'cannot give the device "{host}" to the container: {why}',
        'load the driver, then write the spec again with "gpuruntime cdi generate"',
    )
