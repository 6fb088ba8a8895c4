# SPDX-License-Identifier: Apache-2.0
"""Work in a container's root that cannot wait for its hook.

On the start path, for few creates. runc makes a read-only root read-only behind its hooks, crun
in front of them: there the hook could link nothing, and write no loader's cache. So that part of
it is done before crun is called, by the same program in a process of its own, with all of a hook's
precautions. It need not succeed: the hook comes again, does what is missing, or says why it
cannot.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal without enum
import os
import posixpath

from cdi import strictjson
from cdi.edits import has_user_namespace
from gpuruntime import slowpath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from cdi.wire import Edits, OciConfig

_HOOK = "update-container"
_AHEAD = "--ahead"
_LINK = "--link"
# What the hook writes besides links, and how it does not.
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf.d")
_WITHOUT_LOADER = ("--ldconfig-mode", "none")


def hooks(
    edits: Edits | None, document: OciConfig, places: Sequence[object], runtime: str
) -> list[list[str]]:
    """Return the commands that do ahead what hooks of *edits* would do too late under *runtime*.

    *places* are those of the container's own mounts: what will be below one is left to the hook.
    No commands where the root can be written later on, or another user must own what is written.
    """
    root: Any = document.get("root") or {}
    if edits is None or root.get("readonly") is not True or has_user_namespace(document):
        return []
    if posixpath.basename(os.path.realpath(runtime)).startswith("runc"):
        return []
    texts = [place for place in places if isinstance(place, str)]
    mounted = [posixpath.normpath(f"/{text.lstrip('/')}") for text in texts]
    found = [_ahead(hook, mounted) for hook in edits.get("hooks") or ()]
    return [command for command in found if command]


def run(commands: Sequence[list[str]], bundle: str) -> None:
    """Run *commands* for the container in the directory *bundle*, one after the other."""
    state = {"ociVersion": "1.0.2", "status": "creating", "bundle": os.path.realpath(bundle)}
    for command in commands:
        _run(command, strictjson.dumps(state).encode())


def _ahead(hook: Any, places: Sequence[str]) -> list[str]:  # noqa: ANN401 (JSON)
    """Return the command of *hook* for what is not at *places*, none if the hook is not ours."""
    arguments = list(hook.get("args") or ())
    if hook["hookName"] != "createContainer" or _HOOK not in arguments[1:]:
        return []
    at = arguments.index(_HOOK, 1) + 1
    command = [hook["path"], *arguments[1:at], _AHEAD]
    words = iter(arguments[at:])
    for word in words:
        given = [word, next(words, "")] if word == _LINK else [word]
        if word != _LINK or not _is_covered(given[1].rpartition("::")[2], places):
            command += given
    if any(_is_covered(path, places) for path in _LOADER_FILES):
        command += _WITHOUT_LOADER
    return command


def _is_covered(path: str, places: Sequence[str]) -> bool:
    """Tell whether a mount at one of *places* is at, above or below *path*."""
    return any(_is_within(path, place) or _is_within(place, path) for place in places)


def _is_within(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def _run(command: list[str], state: bytes) -> None:
    """Run *command* with *state* on its standard input, and wait; it has a deadline of its own."""
    try:
        read, write = os.pipe()
    except OSError:
        return
    try:
        # Less than a pipe holds.
        os.write(write, state)
        pid = os.posix_spawn(
            command[0],
            command,
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, read, 0),
                (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
            ],
            setsigmask=(),
            setsigdef=(_signal.SIGALRM, _signal.SIGPIPE, _signal.SIGCHLD),
        )
    except OSError:
        return
    finally:
        os.close(read)
        os.close(write)
    slowpath.reap(pid, 0)
