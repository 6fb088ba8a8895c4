# SPDX-License-Identifier: Apache-2.0
"""The difference of two specs: all of what matters, one line each, and none of what does not."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from effort import tries
from hypothesis import given, settings
from hypothesis import strategies as st
from property import cdi_documents

from cdi import document, generate, yamlio
from cdi.diff import SpecChange, compare

VALID = st.integers(0, 2**32).map(lambda seed: cdi_documents.valid(random.Random(seed)))


def spec(**edits: Any) -> Any:
    """Return a document whose device has *edits*, and a variable."""
    return {
        "cdiVersion": "1.1.0",
        "kind": "vendor.test/class",
        "devices": [{"name": "d", "containerEdits": {"env": ["A=b"], **edits}}],
    }


def lines(old: Any, new: Any) -> list[str]:
    """Return the lines of a comparison."""
    return [change.line() for change in compare(old, new)]


def dumped(value: Any) -> str:
    """Return *value* as a line has it."""
    return json.dumps(value, sort_keys=True)


A, B, C = ({"hostPath": f"/{name}", "containerPath": f"/{name}"} for name in "abc")
X, X_OWNED = {"path": "/x"}, {"path": "/x", "uid": 1}
X_BEFORE, X_AFTER = dumped([X_OWNED, X]), dumped([X, X_OWNED])
HOOK = {"hookName": "createContainer", "path": "/h", "args": ["h", "links"]}
OTHER_HOOK = {**HOOK, "path": "/i"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"env": ["A=1"]}, {"env": ["A=2"]}, ['~ device "d": env "A": "A=1" -> "A=2"']),
        (
            {"env": ["A=1", "B=", "C="]},
            {"env": ["A=1", "C=", "B="]},
            ['~ device "d": env in another order: ["B", "C"] -> ["C", "B"]'],
        ),
        (
            {"env": ["A=1", "A=2"]},
            {"env": ["A=2", "A=1"]},
            ['~ device "d": env in another order: ["A=1", "A=2"] -> ["A=2", "A=1"]'],
        ),
        (
            {"mounts": [A, B]},
            {"mounts": [B, {**A, "options": ["ro"]}]},
            [
                '~ device "d": mount "/a": options none -> ["ro"]',
                '~ device "d": mounts in another order: ["/a", "/b"] -> ["/b", "/a"]',
            ],
        ),
        ({"mounts": [A, B]}, {"mounts": [C, B]}, ["- a", "+ c"]),
        ({"mounts": [A]}, {"mounts": [A, A]}, ["+ a"]),
        ({"mounts": [A, B]}, {"mounts": [A, C, B]}, ["+ c"]),
        (
            {"deviceNodes": [{"path": "/x", "uid": 0}, {"path": "/y"}]},
            {"deviceNodes": [{"path": "/y"}, {"path": "/x", "permissions": "rw"}]},
            ['~ device "d": device node "/x": uid 0 -> none, permissions none -> "rw"'],
        ),
        (
            {"deviceNodes": [X_OWNED, X]},
            {"deviceNodes": [X, X_OWNED]},
            [f'~ device "d": device nodes in another order: {X_BEFORE} -> {X_AFTER}'],
        ),
        (
            {"hooks": [HOOK]},
            {"hooks": [{**HOOK, "timeout": 0}]},
            ['~ device "d": hook "createContainer /h links": timeout none -> 0'],
        ),
        (
            {"hooks": [HOOK]},
            {"hooks": [OTHER_HOOK]},
            [
                f'- device "d": hook "createContainer /h links": {dumped(HOOK)}',
                f'+ device "d": hook "createContainer /i links": {dumped(OTHER_HOOK)}',
            ],
        ),
        (
            {"additionalGids": [1, 2]},
            {"additionalGids": [2, 3, 1]},
            ['+ device "d": group "3": 3'],
        ),
        ({"intelRdt": {}}, {}, ['- device "d": intelRdt: {}']),
        (
            {"intelRdt": {"closID": "a"}},
            {"intelRdt": {"closID": "b"}},
            ['~ device "d": intelRdt: closID "a" -> "b"'],
        ),
        (
            {"netDevices": [{"hostInterfaceName": "a", "name": "b"}]},
            {"netDevices": [{"hostInterfaceName": "a", "name": "c"}]},
            ['~ device "d": network device "a": name "b" -> "c"'],
        ),
    ],
)
def test_edits(old: Any, new: Any, expected: list[str]) -> None:
    """Each difference is one line that names the device, the edit and what is different."""
    short = {
        f"{sign} {name}": f'{sign} device "d": mount "/{name}": {dumped(mount)}'
        for name, mount in (("a", A), ("b", B), ("c", C))
        for sign in "+-"
    }
    expected = [short.get(line, line) for line in expected]
    assert lines(spec(**old), spec(**new)) == expected
    common = [line.replace('device "d"', "common edits", 1) for line in expected]
    olds, news = ({**spec(), "containerEdits": edits} for edits in (old, new))
    assert lines(olds, news) == common


def test_the_spec_and_its_devices() -> None:
    """From top to bottom; a device that is there in one only is one line."""
    old = spec()
    new: Any = {
        "cdiVersion": "v1.1.0",
        "kind": "vendor.test/other",
        "annotations": {"b": "c", "a": "\u00e9"},
        "devices": [
            {"name": "e", "containerEdits": {"env": ["A=b"]}},
            {"name": "f", "annotations": {"a": "b"}, "containerEdits": {"env": ["A=b"]}},
        ],
    }
    assert lines(old, new) == [
        '~ spec: cdiVersion: "1.1.0" -> "v1.1.0"',
        '~ spec: kind: "vendor.test/class" -> "vendor.test/other"',
        '+ spec: annotation "a": "\u00e9"',
        '+ spec: annotation "b": "c"',
        '- device "d"',
        '+ device "e"',
        '+ device "f"',
    ]
    assert compare(old, new)[4] == SpecChange("removed", 'device "d"', "", old["devices"][0], None)
    third = copy.deepcopy(new)
    third["devices"][1]["annotations"] = {"a": "c"}
    assert lines(new, third) == ['~ device "f": annotation "a": "b" -> "c"']


def shuffled(rng: random.Random, value: Any, key: str = "") -> Any:
    """Return *value* with what has no order in another one, and more that is empty."""
    if isinstance(value, dict):
        items = [(member, shuffled(rng, item, member)) for member, item in value.items()]
        if key == "containerEdits":
            items += [(m, []) for m in ("env", "netDevices", "mounts") if m not in value]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        items_ = [shuffled(rng, item, key) for item in value]
        if key in ("devices", "netDevices", "additionalGids"):
            rng.shuffle(items_)
        return items_
    return value


@pytest.mark.property
@settings(max_examples=tries(200))
@given(VALID, st.integers())
def test_how_it_is_written_does_not_count(before: Any, seed: int) -> None:
    """JSON or YAML, the order of members and devices, members that are empty."""
    checked = document.check(before)
    kept = copy.deepcopy(checked)
    after = shuffled(random.Random(seed), before)
    text = generate.encode(checked, random.Random(seed).choice(["json", "yaml"]))
    assert compare(checked, document.check(after)) == []
    assert compare(checked, document.check(yamlio.decode(text))) == []
    assert checked == kept


def in_one_order(checked: Any) -> Any:
    """Return the canonical form with what has no order sorted."""
    found: Any = generate.canonical(checked)
    found["devices"].sort(key=lambda device: device["name"])
    for owner in (found, *found["devices"]):
        edits = owner.get("containerEdits", {})
        keys = (("deviceNodes", "path"), ("netDevices", "hostInterfaceName"))
        for member, key in keys:
            if member in edits:
                edits[member].sort(key=lambda item, key=key: item[key])
        if "additionalGids" in edits:
            edits["additionalGids"].sort()
    return found


@pytest.mark.property
@settings(max_examples=tries(300))
@given(VALID, VALID, st.booleans())
def test_nothing_is_missed(one: Any, other: Any, is_near: bool) -> None:
    """Two specs have no difference only if they are equal; the other way round is the reverse."""
    if is_near:
        # A part of the other: most differences are small.
        changed = copy.deepcopy(one)
        changed["devices"][0]["containerEdits"] |= other["devices"][0]["containerEdits"]
        changed["cdiVersion"] = one["cdiVersion"] = "1.1.0"
        other = changed
    one, other = document.check(one), document.check(other)
    changes = compare(one, other)
    assert (changes == []) == (in_one_order(one) == in_one_order(other))
    assert compare(one, one) == []
    back = {"added": "removed", "removed": "added"}
    reverse = [
        SpecChange(back.get(c.what, c.what), c.where, c.item, c.new, c.old)  # type: ignore[arg-type]
        for c in changes
    ]
    found = compare(other, one)
    assert sorted(map(repr, found)) == sorted(map(repr, reverse))
    assert all("\n" not in change.line() for change in changes)
    json.dumps([[c.old, c.new] for c in changes])
