# SPDX-License-Identifier: Apache-2.0
"""Statements are found in the text of a TOML file, each with its span."""

from __future__ import annotations

import pytest

from gpuruntime.formats import toml_source


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a.b = [ # 1\n 2\n] # c\n", [("key", ("a", "b"), "[ # 1\n 2\n]", False)]),
        ("[a] # h\r\nx = 1\r\n", [("table", ("a",), "", False), ("key", ("a", "x"), "1", False)]),
        (
            "[a]\n#x = 1\r\n",
            [("table", ("a",), "", False), ("sample", ("a", "x"), "#x = 1", False)],
        ),
        ("x = 1 # y = 2\n", [("key", ("x",), "1", False)]),
        ("x = [\n# y = 2\n]", [("key", ("x",), "[\n# y = 2\n]", False)]),
        (
            "[['a']]\nx = {y = 1}\n[b]\n",
            [
                ("table", ("a",), "", True),
                ("key", ("a", "x"), "{y = 1}", True),
                ("table", ("b",), "", False),
            ],
        ),
    ],
)
def test_each_statement_has_its_path_and_value(
    text: str, wanted: list[tuple[str, tuple[str, ...], str, bool]]
) -> None:
    """Comments in values and behind them are no samples; items of arrays are marked."""
    assert [
        (found.kind, found.path, text[found.value : found.value_end], found.in_array)
        for found in toml_source.scan(text)
    ] == wanted
    assert "".join(text[found.start : found.end] for found in toml_source.scan(text)) == text


def test_equal_meaning_is_that_of_the_values() -> None:
    """Empty tables and the way of writing do not count, types and nan do."""
    assert toml_source.has_meaning("[a]\n[b]\nx = 0x10\n", {"b": {"x": 16}})
    assert toml_source.has_meaning("x = nan\n", {"x": float("nan")})
    assert not toml_source.has_meaning("x = 1.0\n", {"x": 1})
    assert not toml_source.has_meaning("x = \n", {})
