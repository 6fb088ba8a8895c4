# SPDX-License-Identifier: Apache-2.0
"""Probes: cheap questions to the host, and which of the answers have changed.

On the start path. A *plan* is {part: [operation, [arguments]]}, made by the module that knows
where things are; a *state* is {part: [operation, {argument: answer}]}, which is enough to ask
again. Both are plain JSON. Answers are compared for equality, never for age, because clocks are
set back. A missing file is an answer too.
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

# Without it, nobody knows what the other parts mean.
PROGRAM = "program"
VERSION = "version"
PLACE, IDENTITY, EXISTS = "place", "identity", "exists"
LINK, NAMES, NODES, CONTENT, VARIABLE = "link", "names", "nodes", "content", "variable"
_MAX_BYTES = 1 << 20
# The largest prime below 2^30, by which a number of any length is divided in one pass.
_PRIME = 1073741789


def read(plan: Plan) -> State:
    """Return the state of what *plan* asks for."""
    return {part: [operation, _ask(operation, asked)] for part, (operation, asked) in plan.items()}


def changed(state: object) -> list[str]:
    """Return the names of the parts of *state* to which the host now answers otherwise.

    [] if it still holds. Of something that no `read` has returned, at least one part has changed.
    """
    if not isinstance(state, dict) or not _asks_version(state.get(PROGRAM)):
        return [PROGRAM]
    return [part for part, probe in state.items() if not _holds(probe)]


def identities(paths: Iterable[str]) -> list[Any]:
    """Return the part of a state that changes with each file of *paths* itself."""
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
    operation, answers = probe
    ask = _OPERATIONS[operation]
    if operation not in _OF_FILES:
        return all(ask(argument) == answer for argument, answer in answers.items())
    # Many files were missing and still are. access(2) says so without an exception, at a fifth of
    # the cost.
    follows = operation != LINK
    access, exists = os.access, os.F_OK
    return all(
        (answer is None and not access(argument, exists, follow_symlinks=follows))
        or ask(argument) == answer
        for argument, answer in answers.items()
    )


def _place(path: str) -> list[int] | None:
    """Return device and inode: another file system, another module, another directory."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_dev, status.st_ino]


def _identity(path: str) -> list[int] | None:
    """Return what changes with a file, or with the names in a directory."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [
        *(status.st_dev, status.st_ino, status.st_size),
        # Tools set the former back.
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
    """Return mode, uid, gid and device of what is at a path itself, or begins with `PATH*`."""
    directory, _, name = pattern.rpartition("/")
    names = [name]
    if name.endswith("*"):
        names = [other for other in _names(directory) or () if other.startswith(name[:-1])]
    nodes = {}
    for name in names:
        try:
            status = os.lstat(f"{directory}/{name}")
        except (OSError, ValueError):
            continue
        nodes[name] = [status.st_mode, status.st_uid, status.st_gid, status.st_rdev]
    return nodes


def _content(path: str) -> list[int] | None:
    """Return length and remainder of the bytes of a file, which /proc gives no other mark."""
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
    return [len(data), int.from_bytes(data, "big") % _PRIME]


def _variable(name: str) -> str | None:
    from os import environ  # noqa: PLC0415 (the start path asks for no variable)

    try:
        return environ.get(name)
    except ValueError:
        return None


def _of_program(name: str) -> object:
    """Return the version of this program, or the content of a file of it."""
    if name == VERSION:
        return __version__
    return _content(f"{__file__.rpartition('/')[0]}/{name}")


# Operations that answer None for a file that is missing.
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
