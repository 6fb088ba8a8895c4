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
import time

from cdi import strictjson
from cdi.edits import has_user_namespace
from gpuruntime import slowpath
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
# What the hook writes besides links, and how it does not.
_LOADER_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf.d")
_WITHOUT_LOADER = ("--ldconfig-mode", "none")
# Of a hook that gives none. Ours have a deadline before it.
_TIMEOUT_S = 30
_GRACE_S = 1
_STEP_S = 0.002
# What any pipe holds.
_MAX_STATE_BYTES = 4096


class Command(Record):
    """A program, its arguments from argv[0] on, and how long it may take."""

    __slots__ = ("arguments", "path", "timeout_s")

    def __init__(self, path: str, arguments: list[str], timeout_s: int) -> None:
        self.path = path
        self.arguments = arguments
        self.timeout_s = timeout_s


def commands(edits: Edits | None, document: OciConfig, runtime: str) -> list[Command]:
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


def run(found: Sequence[Command], bundle: str) -> None:
    """Run the commands *found* for the container in *bundle*, one after the other."""
    state = {"ociVersion": "1.0.2", "status": "creating", "bundle": os.path.realpath(bundle)}
    data = strictjson.dumps(state).encode()
    for command in found:
        if len(data) <= _MAX_STATE_BYTES:
            _run(command, data)


def _ahead(hook: Any, places: Sequence[str]) -> Command | None:  # noqa: ANN401 (JSON)
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
    return Command(hook["path"], arguments, hook.get("timeout") or _TIMEOUT_S)


def _is_covered(path: str, places: Sequence[str]) -> bool:
    """Tell whether a mount at one of *places* is at, above or below *path*."""
    return any(_is_within(path, place) or _is_within(place, path) for place in places)


def _is_within(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def _run(command: Command, state: bytes) -> None:
    """Run *command* with *state* on its standard input, and wait for it."""
    try:
        read, write = os.pipe()
    except OSError:
        return
    try:
        os.write(write, state)
        pid = slowpath.spawn(command.path, command.arguments, {}, read)
    except OSError:
        return
    finally:
        os.close(read)
        os.close(write)
    if not _has_ended(pid, command.timeout_s):
        os.kill(pid, _signal.SIGKILL)
        _has_ended(pid, _GRACE_S)
    slowpath.reap(pid, os.WNOHANG)


def _has_ended(pid: int, seconds: float) -> bool:
    """Wait *seconds* for the child *pid*; tell whether it is no more."""
    end = time.monotonic() + seconds
    try:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() >= end:
                return False
            time.sleep(_STEP_S)
    except ChildProcessError:
        # An engine that ignores SIGCHLD has it reaped by the kernel.
        pass
    return True
