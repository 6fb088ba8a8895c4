# SPDX-License-Identifier: Apache-2.0
"""Recognise common CDI documents for little more than the cost of decoding their JSON.

On the start path; pure. `document.check` returns every document unchanged that `devices` accepts.
If `devices` is in doubt, it returns None, and `document.check` decides. A property test compares
the two.

Objects of one kind are checked together, one member at a time: a node with hundreds of devices
costs a few calls into loops of the interpreter instead of thousands of steps in Python.
"""

from __future__ import annotations

from itertools import chain, repeat
from operator import contains, itemgetter

from cdi import document, names, version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from cdi.wire import Device

    # Checks all values of a member; returns the number of members of the objects in them.
    Check = Callable[[list[Any]], int]

# Every member checked here exists in 0.5.0; members of newer versions need the full check.
_VERSIONS = frozenset(version.KNOWN[version.KNOWN.index("0.5.0") :])


_SPACED_COLONS = (" :", "\n:", "\t:", "\r:")


class _DoubtError(Exception):
    """The document needs the full check."""


def devices(text: str, spec: Any) -> dict[str, Device] | None:  # noqa: ANN401 (JSON)
    """Return name → device of *spec*, decoded from the JSON *text*; None if it is in doubt."""
    # Without white space before a colon, each member's name ends with `":`. If the text has no
    # more of those than the decoded document has members, no member occurs twice.
    names_end = text.count('":')
    if names_end != text.count(":") and any(map(contains, repeat(text), _SPACED_COLONS)):
        return None
    try:
        members = _objects([spec], _SPEC, ("cdiVersion", "kind", "devices"))
        by_name = {device["name"]: device for device in spec["devices"]}
    except (_DoubtError, KeyError, TypeError, AttributeError):
        return None
    if not by_name or len(by_name) != len(spec["devices"]) or members != names_end:
        return None
    return by_name


def _require(*facts: bool) -> int:
    if not all(facts):
        raise _DoubtError
    return 0


def _objects(objects: list[Any], table: dict[str, Check], required: tuple[str, ...]) -> int:
    """Return the number of members of *objects*, checked by *table*; raise _DoubtError."""
    _require({dict}.issuperset(map(type, objects)))
    count = sum(map(len, objects))
    for member in set(required).union(*objects):
        try:
            values = list(map(itemgetter(member), objects))
        except KeyError:
            _require(member not in required)
            values = [item[member] for item in objects if member in item]
        count += table[member](values)
    return count


def _lists(values: list[Any]) -> list[Any]:
    """Return the items of all *values*, which are lists."""
    _require({list}.issuperset(map(type, values)))
    return list(chain.from_iterable(values))


def _programs(values: list[Any]) -> int:
    # In doubt about every path that cannot be a hook's program, and about a few that can.
    joined = "\n".join(["", *values])
    absolute = joined.count("\n/") == joined.count("\n")
    return _require(all(values), absolute, "/proc" not in joined, "/dev/" not in joined)


def _strings(values: list[Any]) -> int:
    # Raises TypeError for any other type.
    "".join(values)
    return 0


def _texts(values: list[Any]) -> int:
    return _require(all(values)) + _strings(values)


def _lists_of_strings(values: list[Any]) -> int:
    return _strings(_lists(values))


def _environments(values: list[Any]) -> int:
    entries = _lists(values)
    # Each entry has an equals sign, and none begins with it.
    starts = "\0".join(["", *entries])
    return _require(all(values), all(map(contains, entries, repeat("="))), "\0=" not in starts)


def _numbers(values: list[Any]) -> int:
    return _require({int}.issuperset(map(type, values)), min(values) >= 0, max(values) < 2**31)


def _one_of(*allowed: str) -> Check:
    return lambda values: _require(set(values).issubset(allowed))


def _objects_of(table: dict[str, Check], *required: str) -> Check:
    return lambda values: _require(all(values)) + _objects(_lists(values), table, required)


def _kinds(values: list[Any]) -> int:
    vendor, _, cls = values[0].partition("/")
    # A dot in the class needs 0.6.0.
    return _require(names.is_name(vendor), names.is_name(cls), "." not in cls)


def _device_names(values: list[Any]) -> int:
    joined = "".join(values)
    if all(values) and joined.isascii() and joined.isalnum():
        return 0
    return _require(all(map(names.is_device, values)))


def _edits(values: list[Any]) -> int:
    return _objects(values, _EDITS, ())


def _filled_edits(values: list[Any]) -> int:
    # The lists in them must not be empty either.
    return _require(all(values)) + _edits(values)


_EDITS: dict[str, Check] = {
    "env": _environments,
    "deviceNodes": _objects_of(
        {
            **dict.fromkeys(("major", "minor", "fileMode", "uid", "gid"), _numbers),
            "path": _texts,
            "hostPath": _strings,
            "type": _one_of("", "b", "c", "u", "p"),
            "permissions": _one_of("", "r", "w", "m", "rw", "rm", "wm", "rwm"),
        },
        "path",
    ),
    "mounts": _objects_of(
        {
            "hostPath": _texts,
            "containerPath": _texts,
            "options": _lists_of_strings,
            "type": _strings,
        },
        "hostPath",
        "containerPath",
    ),
    "hooks": _objects_of(
        {
            "hookName": _one_of(*document.HOOK_NAMES),
            "path": _programs,
            "args": _lists_of_strings,
            "env": _environments,
            "timeout": _numbers,
        },
        "hookName",
        "path",
    ),
}
_SPEC: dict[str, Check] = {
    "cdiVersion": _one_of(*_VERSIONS),
    "kind": _kinds,
    "devices": _objects_of(
        {"name": _device_names, "containerEdits": _filled_edits}, "name", "containerEdits"
    ),
    "containerEdits": _edits,
}
