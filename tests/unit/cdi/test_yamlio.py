# SPDX-License-Identifier: Apache-2.0
"""YAML: what we write every reader takes for the same document; bombs do not go off."""

from __future__ import annotations

import json

import costs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cdi import generate, yaml_text, yamlio
from cdi.errors import CdiError

ODD = ("y", "n", "no", "1e3", "0o17", "0x1", "1:30", "~", "null", "", " ", "2026-01-01", "é", '"')
RESERVED = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
TEXT = st.text("ab:#-'\"\\\n\té😀\x85\u2028 ", max_size=8)
MEMBER = st.from_regex(r"[a-z]{1,8}", fullmatch=True).filter(lambda key: key not in RESERVED)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBER, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("text", [*ODD, "#", "\n"])
def test_a_string_stays_a_string(text: str) -> None:
    """A device called `y` would be called `true` by another reader."""
    written = yaml_text.encode({"name": text})
    assert yamlio.decode(written) == {"name": text}
    assert written.startswith('---\nname: "')


@pytest.mark.property
@given(VALUES)
def test_what_is_written_is_read_back(value: object) -> None:
    """Any document, in both formats."""
    assert yamlio.decode(yaml_text.encode({"value": value})) == {"value": value}
    assert json.loads(generate.encode_json({"value": value})) == {"value": value}  # type: ignore[typeddict-unknown-key]


@pytest.mark.property
@given(VALUES)
def test_pyyaml_reads_what_is_written_by_its_own_rules(value: object) -> None:
    """The reader of most tools in Python, which is neither ours nor that of engines."""
    assert yaml.safe_load(yaml_text.encode({"value": value})) == {"value": value}


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("a: 1\na: 2\n", "duplicate-key"),
        ("a: {b: 1, b: 2}", "duplicate-key"),
        ("~: x", "syntax"),
        ("a: &a [*a]", "syntax"),
        ("a: *b", "syntax"),
        ("a: {<<: 7}", "syntax"),
        ("a: &a {b: 1}\nc: {<<: *a, b: 2}", "duplicate-key"),
        ("1: x\n'1': y", "duplicate-key"),
        ("a: !!int x", "syntax"),
        ("a: !!bool 1", "syntax"),
        ("a: !odd 1", "syntax"),
        ("a: !odd [1]", "syntax"),
        ("? [a, b]\n: x", "syntax"),
        ("a: [", "syntax"),
        ("\tb: 1", "syntax"),
        ("!!python/object/apply:os.system ['true']", "syntax"),
        ("a: !!binary Z3B1", "syntax"),
        ("a: !!set {b, c}", "syntax"),
        ("a: !!timestamp 2026-01-01", "syntax"),
        ("a: \x01", "syntax"),
        ("[" * 50_000, "syntax"),
    ],
)
def test_what_is_refused(text: str, category: str) -> None:
    """One line with the place, never a traceback."""
    with pytest.raises(CdiError) as error:
        yamlio.decode(text)
    assert error.value.category == category
    assert "\n" not in error.value.message


def test_an_alias_bomb_is_refused_at_once() -> None:
    """A kilobyte that would be a gigabyte as JSON."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 100)}]" for i in range(1, 12)]
    with costs.at_most(5), pytest.raises(CdiError, match="aliases"):
        yamlio.decode("\n".join(lines))


def test_only_the_first_document_counts() -> None:
    """As with other readers: the rest is not even parsed."""
    assert yamlio.decode("a: 1\n---\n[") == {"a": 1}
    assert yamlio.decode("# nothing\n") is None


INF = float("inf")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(word, True) for word in ("y", "Y", "yes", "Yes", "YES", "true", "True", "on", "ON")],
        *[(word, False) for word in ("n", "N", "no", "No", "NO", "false", "FALSE", "off", "Off")],
        *[(word, None) for word in ("", "~", "null", "Null", "NULL")],
        *[
            (word, word)
            for word in ("yEs", "oN", "nULL", "tRUE", "1:30", "2026-01-02", "0x", "_1")
        ],
        *[("7", 7), ("+7", 7), ("-7", -7), ("0", 0), ("-0", 0), ("1_000", 1000), ("1__0_", 10)],
        *[("0x1F", 31), ("0X1f", 31), ("-0x1f", -31), ("0b101", 5), ("0B1", 1), ("-0b11", -3)],
        *[("010", 8), ("0o17", 15), ("-0o7", -7), ("0_7", 7), ("08", 8.0), ("09.5", 9.5)],
        *[
            ("1e3", 1000.0),
            ("1E3", 1000.0),
            ("1.", 1.0),
            (".5", 0.5),
            ("-.5", -0.5),
            ("1_0.5", 10.5),
        ],
        *[(".inf", INF), ("+.Inf", INF), ("-.INF", -INF), (".iNf", ".iNf"), (".", ".")],
        ("18446744073709551615", 2**64 - 1),
        ("18446744073709551616", 2.0**64),
        ("-9223372036854775809", -(2.0**63)),
        ("1e999", "1e999"),
        ("1" * 10_000, "1" * 10_000),
        ("!!str 7", "7"),
        ("! 7", 7),
        ("!!int '7'", 7),
        ("!!float 7", 7),
        ("'y'", "y"),
        ('"\\u00e9\\x41"', "\u00e9A"),
    ],
)
def test_scalars_are_those_of_yaml_1_1_as_go_reads_them(text: str, value: object) -> None:
    """PyYAML's own rules differ in y, 0o17, 1e3, 1:30 and dates."""
    found = yamlio.decode(f"a: {text}\n")
    assert found == {"a": value}
    assert type(found["a"]) is type(value)  # type: ignore[index]


def test_member_names_become_strings() -> None:
    """As readers in Go turn a YAML map into a JSON object."""
    text = "1: a\ny: b\n1.50: c\n.inf: d\n0x10: e\n"
    assert yamlio.decode(text) == {"1": "a", "true": "b", "1.5": "c", ".inf": "d", "16": "e"}


def test_merge_keys_and_anchors() -> None:
    """The usual ways of not writing a thing twice."""
    text = "a: &a {b: 1}\nc: &c {d: 2}\ne: {<<: [*a, *c], f: *a}\n"
    assert yamlio.decode(text) == {
        "a": {"b": 1},
        "c": {"d": 2},
        "e": {"b": 1, "d": 2, "f": {"b": 1}},
    }


def test_tabs_in_flow_style() -> None:
    """JSON indented with tabs is JSON."""
    assert yamlio.decode('{\t"a":\t[1,\t2]\n\t}') == {"a": [1, 2]}


def test_lines_are_those_of_members_and_items() -> None:
    """What an editor wants to jump to."""
    lines: dict[tuple[str | int, ...], int] = {}
    yamlio.decode("a: 1\nb:\n- c:\n    d\n- &x e\n- *x\n", lines)
    assert lines == {
        (): 1,
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 0, "c"): 3,
        ("b", 1): 5,
        ("b", 2): 6,
    }


def test_documents_of_manifests() -> None:
    """All of them, with their own anchors; a key may override a merged one, tags may be any."""
    text = """
a: &a {k: 1, other: {x: z}}
b: {<<: *a, k: 2}
c: {k: 3, <<: *a}
d: !override [!reset null, !x "1"]
---
&a no
---
"""
    first, second, third = yamlio.decode_documents(text)
    merged = {"other": {"x": "z"}}
    assert first == {
        "a": {"k": 1, **merged},
        "b": {"k": 2, **merged},
        "c": {"k": 3, **merged},
        "d": [None, "1"],
    }
    assert (second, third) == (False, None)
    assert yamlio.decode_documents("") == []


@pytest.mark.parametrize(
    "text",
    ["b: {<<: [{k: 1}], k: 2, k: 3}", "a: &a 1\n---\nb: *a", "a: b: c", "- 1\n...\nx"],
    ids=["a key twice", "an anchor of another document", "syntax", "text behind the end"],
)
def test_documents_of_manifests_that_are_refused(text: str) -> None:
    """As Go's reader refuses them."""
    with pytest.raises(CdiError):
        yamlio.decode_documents(text)
