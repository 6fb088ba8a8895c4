# SPDX-License-Identifier: Apache-2.0
"""Recognise common CDI documents for little more than the cost of decoding their JSON.

On the start path; pure. A document that `devices` accepts is one that `document.check` returns
unchanged; in any doubt `devices` gives no answer, and `document.check` decides. A property test
compares the two.

Objects of one kind are checked together, one member at a time: a node with hundreds of devices
costs some calls into the interpreter's own loops instead of thousands of steps in ours.
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

    # Looks at all values of a member; returns how many members the objects in them have.
    Check = Callable[[list[Any]], int]

# What is looked at here, 0.5.0 has; whatever newer versions brought is left to the full check.
_VERSIONS = frozenset(version.KNOWN[version.KNOWN.index("0.5.0") :])


_SPACED_COLONS = (" :", "\n:", "\t:", "\r:")


class _DoubtError(Exception):
    """The document needs the full check."""


def devices(text: str, spec: Any) -> dict[str, Device] | None:  # noqa: ANN401 (JSON)
    """Return name → device of *spec*, decoded from the JSON *text*; None if it is in doubt."""
    # Without white space before a colon, each member's name ends with `":`. If there are no more
    # of those than members in the decoded document, no member was there twice.
    names_end = text.count('":')
    if names_end != text.count(":") and any(map(contains, repeat(text), _SPACED_COLONS)):
        return None
    try:
        members = _objects([spec], _SPEC, ("cdiVersion", "kind", "devices"))
        found = {device["name"]: device for device in spec["devices"]}
    except (_DoubtError, KeyError, TypeError, AttributeError):
        return None
    if not found or len(found) != len(spec["devices"]) or members != names_end:
        return None
    return found


def _require(*facts: bool) -> int:
    if not all(facts):
        raise _DoubtError
    return 0


def _objects(objects: list[Any], table: dict[str, Check], required: tuple[str, ...]) -> int:
    """Look at *objects*, whose members are those of *table*, *required* in each."""
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
    # No answer for what may not be the program of a hook, and for a few that may.
    joined = "\n".join(["", *values])
    absolute = joined.count("\n/") == joined.count("\n")
    return _require(all(values), absolute, "/proc" not in joined, "/dev/" not in joined)


def _strings(values: list[Any]) -> int:
    # Raises TypeError for anything else.
    "".join(values)
    return 0


def _texts(values: list[Any]) -> int:
    return _require(all(values)) + _strings(values)


def _lists_of_strings(values: list[Any]) -> int:
    return _strings(_lists(values))


def _environments(values: list[Any]) -> int:
    entries = _lists(values)
    # Nowhere an entry that begins with the sign, or has none.
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
    # The lists in them are not empty either, or there is doubt.
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
