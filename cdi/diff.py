# SPDX-License-Identifier: Apache-2.0
"""Find the differences between two CDI specs in what they request; pure.

The notation of a document, the order of members and devices, and the order of edits that are
independent in an OCI config do not matter. The order of env, hooks and mounts does: it decides
which one takes effect, runs first or is on top.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cdi import document, generate
from cdi.wire import Device, Edits, Spec

What = Literal["added", "removed", "changed", "reordered"]

_SIGNS = {"added": "+", "removed": "-", "changed": "~", "reordered": "~"}


@dataclass(frozen=True, slots=True)
class SpecChange:
    """One difference: *item* of *where*, which is the spec, its common edits or a device.

    *old* and *new* are JSON values, None for a missing item. For reordered items they are lists of
    the names, without those that are equal at both ends.
    """

    what: What
    where: str
    item: str
    old: Any
    new: Any

    def line(self) -> str:
        """Return the change as one line; its sign (+, - or ~) is the first character."""
        head = f"{_SIGNS[self.what]} {self.where}"
        if not self.item:
            return head
        head += f": {self.item}"
        if self.what == "changed":
            return f"{head}: {_changed_text(self.old, self.new)}"
        if self.what == "reordered":
            return f"{head} in another order: {_json(self.old)} -> {_json(self.new)}"
        return f"{head}: {_json(self.new if self.what == 'added' else self.old)}"


@dataclass(frozen=True, slots=True)
class _List:
    """How to compare a list of edits: its nouns, the key of an item, whether its order counts."""

    noun: str
    plural: str
    key: Callable[[Any], str]
    is_ordered: bool


def _hook_key(hook: dict[str, Any]) -> str:
    # One program usually serves as several hooks, which its first argument distinguishes.
    return " ".join([hook["hookName"], hook["path"], *hook.get("args", ())[1:2]])


_LISTS = {
    "env": _List("env", "env", lambda entry: entry.partition("=")[0], is_ordered=True),
    "deviceNodes": _List(
        "device node", "device nodes", lambda node: node["path"], is_ordered=False
    ),
    "netDevices": _List(
        "network device", "network devices", lambda d: d["hostInterfaceName"], is_ordered=False
    ),
    "hooks": _List("hook", "hooks", _hook_key, is_ordered=True),
    "mounts": _List("mount", "mounts", lambda mount: mount["containerPath"], is_ordered=True),
    "additionalGids": _List("group", "groups", str, is_ordered=False),
}


def compare(old: Spec, new: Spec) -> list[SpecChange]:
    """Return the differences of *new*, in the order of a document; [] if the specs are equal.

    Raises CdiError as a loader does.
    """
    before, after = (generate.canonical(document.check(spec)) for spec in (old, new))
    changes = [
        *_value("spec", "cdiVersion", before["cdiVersion"], after["cdiVersion"]),
        *_value("spec", "kind", before["kind"], after["kind"]),
        *_annotations("spec", before, after),
    ]
    olds, news = ({d["name"]: d for d in spec["devices"]} for spec in (before, after))
    for name in dict.fromkeys([*olds, *news]):
        changes += _device(f"device {_json(name)}", olds.get(name), news.get(name))
    common = (spec.get("containerEdits") or {} for spec in (before, after))
    return [*changes, *_edits("common edits", *common)]


def _value(where: str, item: str, old: Any, new: Any) -> Iterator[SpecChange]:  # noqa: ANN401 (JSON)
    if old != new:
        kind: What = "added" if old is None else "removed" if new is None else "changed"
        yield SpecChange(kind, where, item, old, new)


def _annotations(where: str, old: Spec | Device, new: Spec | Device) -> Iterator[SpecChange]:
    before, after = old.get("annotations", {}), new.get("annotations", {})
    for key in sorted(before.keys() | after.keys()):
        yield from _value(where, f"annotation {_json(key)}", before.get(key), after.get(key))


def _device(where: str, old: Device | None, new: Device | None) -> Iterator[SpecChange]:
    if old is None or new is None:
        yield from _value(where, "", old, new)
        return
    yield from _annotations(where, old, new)
    yield from _edits(where, old["containerEdits"], new["containerEdits"])


def _edits(where: str, old: Edits, new: Edits) -> Iterator[SpecChange]:
    for member, how in _LISTS.items():
        before, after = (list(_items(edits, member)) for edits in (old, new))
        if not how.is_ordered:
            # A stable sort: of two device nodes with one path, the later one counts.
            before.sort(key=how.key)
            after.sort(key=how.key)
        yield from _list(where, how, before, after)
    yield from _value(where, "intelRdt", old.get("intelRdt"), new.get("intelRdt"))


def _items(edits: Edits, member: str) -> list[Any]:
    return edits.get(member) or []  # type: ignore[return-value]  # member is one of _LISTS


def _list(where: str, how: _List, old: list[Any], new: list[Any]) -> Iterator[SpecChange]:
    """Yield the differences between two lists of edits: items first, then their order."""
    pairs = _pairs(enumerate(old), enumerate(new), _json)
    paired = set(pairs.values())
    pairs |= _pairs(
        ((i, item) for i, item in enumerate(old) if i not in pairs),
        ((i, item) for i, item in enumerate(new) if i not in paired),
        how.key,
    )
    paired = set(pairs.values())
    for i, item in enumerate(old):
        yield from _value(
            where,
            f"{how.noun} {_json(how.key(item))}",
            item,
            new[pairs[i]] if i in pairs else None,
        )
    for i, item in enumerate(new):
        if i not in paired:
            yield SpecChange("added", where, f"{how.noun} {_json(how.key(item))}", None, item)
    order = [pairs[i] for i in sorted(pairs)]
    if order != sorted(order):
        before, after = [old[i] for i in sorted(pairs)], [new[j] for j in sorted(order)]
        names = [how.key(item) for item in before], [how.key(item) for item in after]
        # Items with the same name are distinguished by their whole value.
        alike = names[0] == names[1]
        yield SpecChange(
            "reordered", where, how.plural, *_trimmed(*((before, after) if alike else names))
        )


def _pairs(
    old: Iterable[tuple[int, Any]], new: Iterable[tuple[int, Any]], key: Callable[[Any], str]
) -> dict[int, int]:
    """Return index in *old* → index in *new* of items with the same *key*, in their order."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for i, item in new:
        places[key(item)].append(i)
    unpaired = {name: iter(positions) for name, positions in places.items()}
    pairs = ((i, next(unpaired.get(key(item), iter(())), None)) for i, item in old)
    return {i: j for i, j in pairs if j is not None}


def _trimmed(old: list[Any], new: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return both lists without their equal items at the start and the end."""
    start = 0
    while start < len(old) and old[start] == new[start]:
        start += 1
    end = len(old)
    while end > start and old[end - 1] == new[end - 1]:
        end -= 1
    return old[start:end], new[start:end]


def _changed_text(old: Any, new: Any) -> str:  # noqa: ANN401 (JSON)
    """Return the change as text: for objects, only the members that changed."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{_json(old)} -> {_json(new)}"
    return ", ".join(
        f"{member} {_json(old.get(member))} -> {_json(new.get(member))}"
        for member in dict.fromkeys([*old, *new])
        if old.get(member) != new.get(member)
    )


def _json(value: Any) -> str:  # noqa: ANN401 (JSON)
    return "none" if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)
