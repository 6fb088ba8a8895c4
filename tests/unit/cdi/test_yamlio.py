# SPDX-License-Identifier: Apache-2.0
"""YAML: what we write every reader takes for the same document; bombs do not go off."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi import generate, yamlio
from cdi.errors import CdiError

ODD = ("y", "n", "no", "1e3", "0o17", "0x1", "1:30", "~", "null", "", " ", "2026-01-01", "é", '"')
RESERVED = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
TEXT = st.text("ab:#-'\"\\\n\té😀\x85\u2028 ", max_size=8)
MEMBER = st.from_regex(r"[a-z]{1,8}", fullmatch=True).filter(lambda key: key not in RESERVED)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MEMBER, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("text", [*ODD, "#", "\n"])
def test_a_string_stays_a_string(text: str) -> None:
    """A device called `y` would be called `true` by another reader."""
    written = yamlio.encode({"name": text})
    assert yamlio.decode(written) == {"name": text}
    assert written.startswith('---\nname: "')


@pytest.mark.property
@given(VALUES)
def test_what_is_written_is_read_back(value: object) -> None:
    """Any document, in both formats."""
    assert yamlio.decode(yamlio.encode({"value": value})) == {"value": value}
    assert json.loads(generate.encode_json({"value": value})) == {"value": value}  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("a: 1\na: 2\n", "duplicate-key"),
        ("a: {b: 1, b: 2}", "duplicate-key"),
        ("1: x", "syntax"),
        ("? [a, b]\n: x", "syntax"),
        ("a: [", "syntax"),
        ("\tb: 1", "syntax"),
        ("!!python/object/apply:os.system ['true']", "syntax"),
        ("a: !!binary Z3B1", "syntax"),
        ("a: !!set {b, c}", "syntax"),
        ("a: !!timestamp 2026-01-01", "syntax"),
        ("a: \x01", "syntax"),
        ("[" * 50_000, "syntax"),
        ("a: 1" + "1" * 10_000, "syntax"),
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
    start = time.monotonic()
    with pytest.raises(CdiError, match="aliases"):
        yamlio.decode("\n".join(lines))
    assert time.monotonic() - start < 5


def test_only_the_first_document_counts() -> None:
    """As with other readers: the rest is not even parsed."""
    assert yamlio.decode("a: 1\n---\n[") == {"a": 1}
    assert yamlio.decode("# nothing\n") is None
