# SPDX-License-Identifier: Apache-2.0
"""What the quick check accepts, the full check accepts as it is: over documents and mutations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from effort import tries

from cdi import document, quick, registry
from cdi.errors import CdiError

pytestmark = pytest.mark.property

# Values that fit, nearly fit, or fit elsewhere.
STRINGS = (
    *("", "a", "0", "mig:1", "A=b", "=", "=b", "rw", "rwm", "x", "none", "c", "b", "p", "u", "-"),
    *("createContainer", "prestart", "v.com/c", "v/c.d", "a/b/c", "é", '"', 'a":', " :", "a\n"),
    *("0.3.0", "0.5.0", "v0.5.0", "0.9.0", "1.1.0", "/dev/null", "ro"),
)
ODD = (*STRINGS, 0, 1, -1, 2**31, 2**32, 2**63, 1.0, 1.5, True, None, [], {}, [""], ["A=b"], [1])
NAMES = sorted({name for table in document.TABLES.values() for name in table} | {"Name", "x"})


def edits(rng: random.Random) -> dict[str, Any]:
    """Return valid edits that are not empty."""
    node: dict[str, Any] = {"path": "/dev/x"}
    optional = {"hostPath": "/y", "type": "c", "major": 5, "minor": 0, "fileMode": 438, "uid": 0}
    optional.update({"gid": 7, "permissions": "rw"})
    node.update({k: v for k, v in optional.items() if rng.random() < 0.3})
    mount: dict[str, Any] = {"hostPath": "/a", "containerPath": "/b"}
    mount.update(rng.choice(({}, {"options": ["ro", "bind"]}, {"type": "bind", "options": []})))
    hook: dict[str, Any] = {"hookName": "prestart", "path": "/h"}
    hook.update(rng.choice(({}, {"args": ["a"], "env": ["A=b"]}, {"timeout": 3})))
    parts = {"env": ["A=b", "C="], "deviceNodes": [node], "mounts": [mount], "hooks": [hook]}
    chosen = rng.sample(sorted(parts), rng.randint(1, 4))
    return {name: parts[name] for name in chosen}


def valid(rng: random.Random) -> dict[str, Any]:
    """Return a valid document."""
    result: dict[str, Any] = {
        "cdiVersion": rng.choice(("0.5.0", "0.6.0", "1.1.0")),
        "kind": "v.com/c",
        "devices": [
            {"name": f"{i}", "containerEdits": edits(rng)} for i in range(rng.randint(1, 3))
        ],
    }
    if rng.random() < 0.5:
        result["containerEdits"] = rng.choice(({}, edits(rng)))
    return result


def places(value: Any) -> list[Any]:
    """Return every list and object in *value* that has something in it."""
    inside = value.values() if isinstance(value, dict) else value
    found = [value] if value else []
    for item in inside:
        if isinstance(item, (dict, list)):
            found += places(item)
    return found


def mutate(rng: random.Random, value: Any) -> None:
    """Change, remove or add one thing somewhere in *value*."""
    where = rng.choice(places(value))
    key = rng.choice(sorted(where)) if isinstance(where, dict) else rng.randrange(len(where))
    how = rng.random()
    if how < 0.5:
        where[key] = rng.choice(ODD)
    elif how < 0.7:
        del where[key]
    elif isinstance(where, dict):
        where[rng.choice(NAMES)] = where.pop(key) if how < 0.85 else rng.choice(ODD)
    else:
        where.append(rng.choice((where[key], rng.choice(ODD))))


def text_of(rng: random.Random, value: Any) -> str:
    """Return *value* as JSON in one of the ways people write it, at times with a member twice."""
    text = json.dumps(value, **rng.choice(({}, {"indent": 1}, {"separators": (",", ":")})))
    if rng.random() < 0.1 and '"path"' in text:
        text = text.replace('"path"', '"path": "/other", "path"', 1)
    if rng.random() < 0.05:
        text = text.replace(":", " :", 1)
    return text


def test_the_quick_check_accepts_only_what_the_full_check_accepts(
    record_property: Callable[[str, object], None],
) -> None:
    """And it does accept the usual documents, or it would be of no use."""
    rng = random.Random(7)
    accepted = refused = 0
    documents = tries(30_000)
    for _ in range(documents):
        value = valid(rng)
        changes = rng.randint(0, 2)
        for _ in range(changes):
            mutate(rng, value)
        text = text_of(rng, value)
        spec = json.loads(text)
        devices = quick.devices(text, spec)
        if devices is None:
            refused += 1
            if changes == 0 and " :" not in text:
                with pytest.raises(CdiError):
                    registry.decode_json(text)
            continue
        accepted += 1
        assert registry.decode_json(text) == spec
        checked = document.check(spec)
        assert checked == spec
        assert devices == {device["name"]: device for device in checked["devices"]}
    record_property(
        "summary", f"quick check: {accepted} accepted, {refused} left to the full check"
    )
    assert min(accepted, refused) > documents / 6
