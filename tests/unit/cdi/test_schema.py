# SPDX-License-Identifier: Apache-2.0
"""The two schemas: well-formed, of the same members as the loader, and the verdicts they give."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cdi import document, validate

TREE = Path(__file__).parents[3]
CASES = sorted((TREE / "tests/data/cdi").glob("schema--*.json"))
NAMES = ("reference", "strict")
# The loader's word for a part → the schemas'.
DEFINITIONS = {
    "device": "device",
    "edits": "edits",
    "node": "node",
    "net device": "netDevice",
    "mount": "mount",
    "hook": "hook",
    "rdt": "intelRdt",
}
GOOD: dict[str, Any] = {
    "cdiVersion": "1.1.0",
    "kind": "vendor.test/class",
    "devices": [{"name": "d", "containerEdits": {"env": ["A=b"]}}],
}


def read(name: str) -> dict[str, Any]:
    """Return the schema *name*."""
    found: dict[str, Any] = json.loads((TREE / f"cdi/schema/{name}.json").read_text())
    return found


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in *schema*."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from nodes(value)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_reference_schema_gives_the_reference_s_verdict(path: Path) -> None:
    """With the annotation checks that its tool makes for YAML."""
    case = json.loads(path.read_text())
    found = validate.reference_verdict(case["input"]["text"], case["input"]["filename"])
    assert found == case["expect"]["result"]["valid"], case["why"]


def test_the_corpus_has_cases_for_the_schema() -> None:
    """An empty parametrisation would pass."""
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_draft_07_and_needs_no_network(name: str) -> None:
    """Each reference leads into the same file, and each definition is used."""
    schema = read(name)
    jsonschema.Draft7Validator.check_schema(schema)
    used = {node["$ref"] for node in nodes(schema) if "$ref" in node}
    assert used == {f"#/definitions/{name}" for name in schema["definitions"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_means_the_same_in_every_dialect(name: str) -> None:
    """Only what Python and JavaScript have in common: others use our schemas too."""
    found = [node["pattern"] for node in nodes(read(name)) if isinstance(node.get("pattern"), str)]
    # The reference's has none.
    assert bool(found) is (name == "strict")
    for pattern in found:
        rest = re.sub(r"\(\?!\[\\s\\S\]\)\Z", "", pattern)
        assert rest.startswith("^"), pattern
        assert not re.search(r"\(\?|\\[AZbBdDwWpP]|\$", rest), pattern


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_knows_the_loader_s_members(name: str) -> None:
    """A member that one of them lacks would be an unknown one, or not checked."""
    schema = read(name)
    assert set(schema["properties"]) == set(document.TABLES["spec"])
    for table, definition in DEFINITIONS.items():
        members = set(document.TABLES[table])
        if name == "reference" and table == "node":
            # The reference's does not describe it.
            members.discard("fileMode")
        assert set(schema["definitions"][definition]["properties"]) == members


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("kind", "vendor.test/class\n"),
        ("kind", "vendor.test\n/class"),
        ("cdiVersion", "1.1.0\n"),
        ("devices", [{"name": "d\n", "containerEdits": {"env": ["A=b"]}}]),
        ("devices", [{"name": "d", "containerEdits": {"intelRdt": {"closID": "a\n"}}}]),
        ("devices", [{"name": "d", "containerEdits": {"intelRdt": {"closID": "/\n"}}}]),
        (
            "devices",
            [
                {
                    "name": "d",
                    "containerEdits": {"deviceNodes": [{"path": "/d", "permissions": "r\n"}]},
                }
            ],
        ),
    ],
)
def test_a_last_line_feed_is_not_overlooked(member: str, value: Any) -> None:
    """In Python, `$` would also match before it."""
    strict = validate.schema("strict")
    assert strict.is_valid(GOOD)
    assert not strict.is_valid({**GOOD, member: value})


def test_the_strict_schema_judges_what_is_normalised() -> None:
    """As written, `name: 7` is no string; read, it is."""
    written = {**GOOD, "devices": [{"NAME": 7, "containerEdits": {"env": ["A=b"], "hooks": None}}]}
    strict = validate.schema("strict")
    assert not strict.is_valid(written)
    assert strict.is_valid(document.normalise(written))
