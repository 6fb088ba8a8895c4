# SPDX-License-Identifier: Apache-2.0
"""Rewrite the paths of a CDI spec for another root of the host or of the container; pure.

The driver may be below another directory where a spec is used than where it was made: in an
installer's container it is below a mount point.
"""

from __future__ import annotations

import posixpath
from typing import Literal

from cdi import document, generate, version
from cdi.wire import Edits, Spec

Side = Literal["host", "container"]

# Arguments of these hooks are container paths, because they run in the container's mounts.
_TOLD_OF_CONTAINER = ("createContainer", "startContainer")
# The separator of two paths in one argument, such as `--link TARGET::LINK`.
_SEPARATOR = "::"


def transform_root(checked: Spec, old: str, new: str, *, relative_to: Side) -> Spec:
    """Return *checked* with the directory *new* in place of *old* in the paths of one side.

    Only *old* and paths below it change. If the side is the host, each device node gets an
    explicit host path. The version is kept if it is high enough, else it becomes the lowest that
    is. If both directories are the same, nothing changes. Raises CdiError as a loader does.
    """
    result = generate.canonical(document.check(checked))
    root = _Root(old, new)
    if root.old == root.new:
        return result
    for owner in (result, *result["devices"]):
        if "containerEdits" in owner:
            _rewrite(owner["containerEdits"], root, relative_to)
    claimed, needed = result["cdiVersion"].removeprefix("v"), version.minimum(result)
    if version.KNOWN.index(claimed) < version.KNOWN.index(needed):
        result["cdiVersion"] = needed
    return generate.canonical(result)


class _Root:
    """The replacement of the directory *old* by *new*; "" is "/"."""

    def __init__(self, old: str, new: str) -> None:
        self.old = _clean(old)
        self.new = _clean(new)

    def moved(self, path: str) -> str:
        """Return *path* with the new root; unchanged if it is not below the old one."""
        if not path.startswith("/"):
            return path
        # A path with ".." may lead out of the directory that it begins with.
        clean = _clean(path)
        if self.old == "/":
            return _clean(f"{self.new}{clean}")
        # Whole names only: /run/nvidia is not below /run/nv.
        if not f"{clean}/".startswith(f"{self.old}/"):
            return path
        return _clean(self.new + clean[len(self.old) :])

    def moved_argument(self, argument: str) -> str:
        """Return *argument* with the new root in each of its paths."""
        return _SEPARATOR.join(map(self.moved, argument.split(_SEPARATOR, 1)))


def _clean(path: str) -> str:
    # normpath keeps two slashes at the start.
    return posixpath.normpath("/" + path.lstrip("/"))


def _rewrite(edits: Edits, root: _Root, side: Side) -> None:
    """Rewrite the paths of *edits* in place."""
    is_host = side == "host"
    for node in edits.get("deviceNodes", ()):
        if is_host:
            node["hostPath"] = root.moved(node.get("hostPath") or node["path"])
        else:
            node["path"] = root.moved(node["path"])
    for mount in edits.get("mounts", ()):
        if is_host:
            mount["hostPath"] = root.moved(mount["hostPath"])
        else:
            mount["containerPath"] = root.moved(mount["containerPath"])
    for hook in edits.get("hooks", ()):
        # Only a startContainer hook's program is in the container.
        if is_host == (hook["hookName"] != "startContainer"):
            hook["path"] = root.moved(hook["path"])
        if is_host == (hook["hookName"] not in _TOLD_OF_CONTAINER) and "args" in hook:
            hook["args"] = [root.moved_argument(argument) for argument in hook["args"]]
