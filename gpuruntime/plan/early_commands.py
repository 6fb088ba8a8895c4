# SPDX-License-Identifier: Apache-2.0
"""Which hooks must also run before the low-level runtime, and with which arguments; pure.

On the start path, for read-only roots only. runc makes such a root read-only after its hooks, crun
before them: there a hook can neither make links nor write the loader cache. So the shim runs our
hook program early, for those two tasks (gpuruntime/shim/early_hook.py).
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
# Files that the hook writes besides links, and the option that keeps it from doing so.
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf.d")
_WITHOUT_LOADER = ("--ldconfig-mode", "none")
# For a hook without a timeout; our hooks end at their own deadline before that.
_TIMEOUT_S = 30


class EarlyCommand(Record):
    """A program, its arguments from argv[0] on, and how long it may take."""

    __slots__ = ("arguments", "path", "timeout_s")

    def __init__(self, path: str, arguments: list[str], timeout_s: int) -> None:
        self.path = path
        self.arguments = arguments
        self.timeout_s = timeout_s


def commands(edits: Edits | None, document: OciConfig, runtime: str) -> list[EarlyCommand]:
    """Return what does ahead what hooks of *edits* would do too late under *runtime*.

    *document* has not got the edits. What will be below one of its mounts is left to the hook.
    Nothing where the root can be written later on, or another user must own what is written.
    """
    if edits is None or not has_read_only_root(document) or has_user_namespace(document):
        return []
    if posixpath.basename(os.path.realpath(runtime)).startswith("runc"):
        return []
    places = [mount.get("destination") for mount in document.get("mounts") or ()]
    texts = [place for place in places if isinstance(place, str)]
    mounted = [posixpath.normpath(f"/{text.lstrip('/')}") for text in texts]
    found = [_ahead(hook, mounted) for hook in edits.get("hooks") or ()]
    return [command for command in found if command is not None]


def _ahead(hook: Any, places: Sequence[str]) -> EarlyCommand | None:  # noqa: ANN401 (JSON)
    """Return the command of *hook* for what is not at *places*, None if the hook is not ours."""
    given_arguments = list(hook.get("args") or ())
    is_placed = hook["hookName"] == "createContainer" and hook["path"].startswith("/")
    if not is_placed or _HOOK not in given_arguments[1:]:
        return None
    at = given_arguments.index(_HOOK, 1) + 1
    arguments = [*given_arguments[:at], _AHEAD]
    words = iter(given_arguments[at:])
    for word in words:
        name, equals, value = word.partition("=")
        given = [word]
        if name == _LINK and not equals:
            value = next(words, "")
            given.append(value)
        if name != _LINK or not _is_covered(value.rpartition("::")[2], places):
            arguments += given
    if any(_is_covered(path, places) for path in _LOADER_FILES):
        arguments += _WITHOUT_LOADER
    return EarlyCommand(hook["path"], arguments, hook.get("timeout") or _TIMEOUT_S)


def _is_covered(path: str, places: Sequence[str]) -> bool:
    """Return whether a mount at one of *places* is at, above or below *path*."""
    return any(_is_within(path, place) or _is_within(place, path) for place in places)


def _is_within(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")
