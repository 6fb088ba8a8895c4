# SPDX-License-Identifier: Apache-2.0
"""Select the hooks that must also run before the low-level runtime, and their arguments; pure.

On the start path, for read-only roots only. runc makes such a root read-only after its hooks, crun
before them: under crun a hook can neither create links nor write the loader cache. Therefore the
shim runs our hook program early, for those two tasks (gpuruntime/shim/early_hook.py).
"""

from __future__ import annotations

import os
import posixpath

from cdi.edits import has_user_namespace
from gpuruntime.oci.bundle import has_read_only_root
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from cdi.wire import Edits, OciConfig

_HOOK = "update-container"
_AHEAD = "--ahead"
_LINK = "--link"
# Files that the hook writes besides links, and the option that prevents it.
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf.d")
_WITHOUT_LOADER = ("--ldconfig-mode", "none")
# For a hook without a timeout; our hooks have a deadline of their own, which is earlier.
_TIMEOUT_S = 30


class EarlyCommand(Record):
    """A program, its arguments including argv[0], and its timeout."""

    __slots__ = ("arguments", "path", "timeout_s")

    def __init__(self, path: str, arguments: list[str], timeout_s: int) -> None:
        self.path = path
        self.arguments = arguments
        self.timeout_s = timeout_s


def commands(edits: Edits | None, document: OciConfig, runtime: str) -> list[EarlyCommand]:
    """Return the commands that do early what hooks of *edits* would do too late under *runtime*.

    *document* does not contain *edits* yet. Paths below one of its mounts are left to the hook.
    The list is empty if the root is writable, or if the container has a user namespace: another
    user must then own the files.
    """
    if edits is None or not has_read_only_root(document) or has_user_namespace(document):
        return []
    if posixpath.basename(os.path.realpath(runtime)).startswith("runc"):
        return []
    destinations = [mount.get("destination") for mount in document.get("mounts") or ()]
    paths = [path for path in destinations if isinstance(path, str)]
    mounted = [posixpath.normpath(f"/{path.lstrip('/')}") for path in paths]
    candidates = [_ahead(hook, mounted) for hook in edits.get("hooks") or ()]
    return [command for command in candidates if command is not None]


def _ahead(hook: Any, mounted: Sequence[str]) -> EarlyCommand | None:  # noqa: ANN401 (JSON)
    """Return the command of *hook* for paths not covered by *mounted*, None for other hooks."""
    hook_arguments = list(hook.get("args") or ())
    is_supported = hook["hookName"] == "createContainer" and hook["path"].startswith("/")
    if not is_supported or _HOOK not in hook_arguments[1:]:
        return None
    start = hook_arguments.index(_HOOK, 1) + 1
    arguments = [*hook_arguments[:start], _AHEAD]
    words = iter(hook_arguments[start:])
    for word in words:
        name, equals, value = word.partition("=")
        option = [word]
        if name == _LINK and not equals:
            value = next(words, "")
            option.append(value)
        if name != _LINK or not _is_covered(value.rpartition("::")[2], mounted):
            arguments += option
    if any(_is_covered(path, mounted) for path in _LOADER_FILES):
        arguments += _WITHOUT_LOADER
    return EarlyCommand(hook["path"], arguments, hook.get("timeout") or _TIMEOUT_S)


def _is_covered(path: str, mounted: Sequence[str]) -> bool:
    """Return whether one of the mount points *mounted* is at, above or below *path*."""
    return any(_is_within(path, mount) or _is_within(mount, path) for mount in mounted)


def _is_within(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")
