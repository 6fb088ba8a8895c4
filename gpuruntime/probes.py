# SPDX-License-Identifier: Apache-2.0
"""Probes: cheap checks of the host, and which of their results have changed.

On the start path. A *plan* is {part: [operation, [arguments]]}, from the module that knows the
paths. A *state* is {part: [operation, {argument: result}]}, which is sufficient to repeat the
probes. Both are plain JSON. Results are compared for equality, never by age, because clocks can be
set back. That a file is missing is a result as well.
"""

from __future__ import annotations

import posix as os

from gpuruntime import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, TypeGuard

    Plan = Mapping[str, list[Any]]
    State = dict[str, list[Any]]

# The part with the version of this program, which defines the meaning of the other parts.
PROGRAM = "program"
VERSION = "version"
PLACE, IDENTITY, EXISTS = "place", "identity", "exists"
LINK, NAMES, NODES, CONTENT, VARIABLE = "link", "names", "nodes", "content", "variable"
_MAX_BYTES = 1 << 20
# The largest prime below 2^30, by which a number of any length is divided in one pass.
PRIME = 1073741789


def read(plan: Plan) -> State:
    """Return the state for *plan*."""
    return {
        part: [operation, _ask(operation, arguments)]
        for part, (operation, arguments) in plan.items()
    }


def changed(state: object) -> list[str]:
    """Return the names of the parts of *state* whose results have changed, [] if none has.

    If *state* is not a result of `read`, at least one part has changed.
    """
    if not isinstance(state, dict) or not _asks_version(state.get(PROGRAM)):
        return [PROGRAM]
    return [part for part, probe in state.items() if not _holds(probe)]


def identities(paths: Iterable[str]) -> list[Any]:
    """Return the part of a state with the identities of the files *paths*."""
    return [IDENTITY, _ask(IDENTITY, paths)]


def _ask(operation: str, arguments: Iterable[str]) -> dict[str, Any]:
    ask = _OPERATIONS[operation]
    return {argument: ask(argument) for argument in arguments}


def _asks_version(probe: object) -> bool:
    return _is_probe(probe) and probe[0] == PROGRAM and VERSION in probe[1]


def _is_probe(probe: object) -> TypeGuard[list[Any]]:
    return (
        isinstance(probe, list)
        and len(probe) == 2
        and isinstance(probe[0], str)
        and isinstance(probe[1], dict)
    )


def _holds(probe: object) -> bool:
    if not _is_probe(probe) or probe[0] not in _OPERATIONS:
        return False
    operation, values = probe
    ask = _OPERATIONS[operation]
    if operation not in _OF_FILES:
        return all(ask(argument) == value for argument, value in values.items())
    # Many files are missing in both states. access(2) shows that without an exception, at a fifth
    # of the cost.
    follows_links = operation != LINK
    access, exists = os.access, os.F_OK
    return all(
        (value is None and not access(argument, exists, follow_symlinks=follows_links))
        or ask(argument) == value
        for argument, value in values.items()
    )


def _place(path: str) -> list[int] | None:
    """Return device and inode, which change if a file or directory is replaced."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_dev, status.st_ino]


def _identity(path: str) -> list[int] | None:
    """Return values that change with a file, or with the names in a directory."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [
        *(status.st_dev, status.st_ino, status.st_size),
        # Both times, because tools set mtime back.
        *(status.st_mtime_ns, status.st_ctime_ns),
    ]


def _exists(path: str) -> bool:
    try:
        return os.access(path, os.F_OK, follow_symlinks=False)
    except ValueError:
        return False


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except (OSError, ValueError):
        return None


def _names(directory: str) -> list[str] | None:
    try:
        return sorted(os.listdir(directory))
    except (OSError, ValueError):
        return None


def _nodes(pattern: str) -> dict[str, list[int]]:
    """Return name → mode, uid, gid, device number of a path, or of those that match `PATH*`."""
    directory, _, name = pattern.rpartition("/")
    names = [name]
    if name.endswith("*"):
        names = [entry for entry in _names(directory) or () if entry.startswith(name[:-1])]
    nodes = {}
    for name in names:
        try:
            status = os.lstat(f"{directory}/{name}")
        except (OSError, ValueError):
            continue
        nodes[name] = [status.st_mode, status.st_uid, status.st_gid, status.st_rdev]
    return nodes


def _content(path: str) -> list[int] | None:
    """Return length and remainder of the bytes of a file: in /proc the times show no change."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    data = b""
    try:
        while len(data) < _MAX_BYTES:
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                break
            data += chunk
    except OSError:
        return None
    finally:
        os.close(fd)
    return [len(data), int.from_bytes(data, "big") % PRIME]


def _variable(name: str) -> str | None:
    from os import environ  # noqa: PLC0415 (the start path probes no variable)

    try:
        return environ.get(name)
    except ValueError:
        return None


def _of_program(name: str) -> object:
    """Return the version of this program, or the content mark of one of its files."""
    if name == VERSION:
        return __version__
    return _content(f"{__file__.rpartition('/')[0]}/{name}")


# Operations whose result is None for a missing file.
_OF_FILES = (PLACE, IDENTITY, LINK, NAMES, CONTENT)
_OPERATIONS: dict[str, Callable[[str], Any]] = {
    PROGRAM: _of_program,
    PLACE: _place,
    IDENTITY: _identity,
    EXISTS: _exists,
    LINK: _link,
    NAMES: _names,
    NODES: _nodes,
    CONTENT: _content,
    VARIABLE: _variable,
}
