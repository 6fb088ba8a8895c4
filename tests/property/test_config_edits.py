# SPDX-License-Identifier: Apache-2.0
"""Laws of changing config.toml: what was set is read, and the rest stays, in every layout."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuruntime.configfile import edit, option_table
from gpuruntime.configfile import lines as config_lines
from gpuruntime.configfile.option_table import Option, Value

pytestmark = pytest.mark.property

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COMMENT = st.sampled_from(["", "# why\n", "\n", "#mode = 'x'\n", "#root = 1\n", "# [features]\n"])


def value_of(option: Option) -> st.SearchStrategy[Value]:
    """Return values that fit *option*."""
    kinds: dict[str, st.SearchStrategy[Value]] = {
        "bool": st.booleans(),
        "optional": st.booleans(),
        "integer": st.integers(1, 999),
        "string": TEXT,
        "list": st.lists(TEXT, max_size=3).map(list),
    }
    return kinds[option.kind]


@st.composite
def settings(draw: st.DrawFn) -> list[tuple[Option, Value]]:
    """Return options with values."""
    chosen = draw(st.lists(st.sampled_from(option_table.OPTIONS), max_size=6, unique_by=id))
    return [(option, draw(value_of(option))) for option in chosen]


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """Return a file with some options: by tables in any order, or by dotted keys."""
    pairs = draw(settings())
    if draw(st.booleans()):
        return "".join(f"{o.key} = {option_table.literal(v)}\n{draw(COMMENT)}" for o, v in pairs)
    tables: dict[str, list[str]] = {}
    for option, value in pairs:
        line = f"{option.name} = {option_table.literal(value)}\n{draw(COMMENT)}"
        tables.setdefault(option.table, []).append(line)
    root = "".join(tables.pop("", []))
    rest = draw(st.permutations(sorted(tables)))
    return root + "".join(f"[{name}]\n{draw(COMMENT)}{''.join(tables[name])}" for name in rest)


def values(text: str) -> dict[str, Any]:
    """Return the values of *text* by key."""
    return {option_table.to_key(path): v for path, v in option_table.flatten(tomllib.loads(text))}


@given(layouts(), settings())
def test_what_is_set_is_read_and_the_rest_stays(
    text: str, changes: list[tuple[Option, Value]]
) -> None:
    """Also that a second time changes nothing."""
    expected = values(text)
    for option, value in changes:
        text = edit.apply(text, option, value)
        expected[option.key] = value
        assert values(text) == expected
    for option, value in changes:
        assert edit.apply(text, option, value) == text
    places = config_lines.lines(text)
    lines = text.split("\n")
    for key in expected:
        line = lines[(config_lines.line_of(tuple(key.split(".")), places) or 0) - 1]
        assert option_table.BY_KEY[key].name in line


@given(TEXT)
def test_a_literal_is_what_toml_reads(text: str) -> None:
    """Every character that a value can have comes back."""
    assert tomllib.loads(f"x = {option_table.literal([text])}") == {"x": [text]}
