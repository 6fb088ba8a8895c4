# SPDX-License-Identifier: Apache-2.0
"""Keys of JSON and TOML documents are set and taken out, and nothing else in the text changes."""

from __future__ import annotations

import json

import pytest

from gpuruntime.engines import document_edits, json_text, toml_text
from gpuruntime.engines.errors import BadFileError


@pytest.mark.parametrize(
    ("text", "path", "value", "wanted"),
    [
        # Above the first table and its comment.
        ("# of a\n[a]\n", ("x",), 1, "x = 1\n\n# of a\n[a]\n"),
        ("# top\n\n[a]\n", ("x",), 1, "# top\n\nx = 1\n\n[a]\n"),
        ("y = 2\n", ("x",), 1, "y = 2\nx = 1\n"),
        ("y = 2", ("x",), 1, "y = 2\nx = 1\n"),
        # In the table, not below the comment of the next.
        ("[a]\n  y = 1\n\n# b\n[b]\n", ("a", "x"), 1, "[a]\n  y = 1\n  x = 1\n\n# b\n[b]\n"),
        ("[a.b]\ny = 1\n", ("a", "x"), "s", '[a.b]\ny = 1\n\n[a]\nx = "s"\n'),
        ("x = 1 # why\n", ("x",), 2, "x = 2 # why\n"),
        ('x = """\na\n""" # why\n', ("x",), [1], "x = [1] # why\n"),
        ("a = {y = 1}\n", ("a", "x"), 1, "a = {y = 1, x = 1}\n"),
        ("a.y = 1\n", ("a", "x"), 1, "a.y = 1\na.x = 1\n"),
        ("[[a]]\nx = 1\n", ("b", "x"), 1, "[[a]]\nx = 1\n\n[b]\nx = 1\n"),
        ("y = 1\r\n", ("x",), 1, "y = 1\r\nx = 1\r\n"),
        ('"a b" = 1\n', ("é",), True, '"a b" = 1\n"é" = true\n'),
        ("[a] # h\r\ny = 1\r\n", ("a", "x"), 1, "[a] # h\r\ny = 1\r\nx = 1\r\n"),
        # What is set keeps its place, its blanks and its comment.
        ("a = {y = 1, z = 2} # c\n", ("a", "y"), 3, "a = {y = 3, z = 2} # c\n"),
        ("  x  =  [\n 1, # one\n]  # c\ny = 1", ("x",), [], "  x  =  []  # c\ny = 1"),
        ("x = []\n", ("x",), [], "x = []\n"),
        ("[a]\nb.x = 1\nb.y = 2\n", ("a", "b", "y"), 3, "[a]\nb.x = 1\nb.y = 3\n"),
        # tomlkit does not read this document.
        ("x = 1\n[[a]]\n[b]\n[a.c]\n", ("x",), 2, "x = 2\n[[a]]\n[b]\n[a.c]\n"),
    ],
)
def test_a_toml_key_is_set_where_a_person_would(
    text: str, path: tuple[str, ...], value: object, wanted: str
) -> None:
    """The next reader is one."""
    assert toml_text.assign(text, path, value) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = []\n", 'x = ["i"]\n'),
        ('x = ["a"] # why\n', 'x = ["a", "i"] # why\n'),
        ('x = ["a",]\n', 'x = ["a", "i"]\n'),
        ('x = [\n  "a", # one\n]\n', 'x = [\n  "a", # one\n  "i",\n]\n'),
        ('x = [\n\t"a" # one\n]\n', 'x = [\n\t"a", # one\n\t"i"\n]\n'),
        ('x = [\r\n  "a",\r\n]\r\n', 'x = [\r\n  "a",\r\n  "i",\r\n]\r\n'),
        ("x = [\n]\n", 'x = ["i"\n]\n'),
    ],
)
def test_an_item_joins_a_toml_list_in_its_manner(text: str, wanted: str) -> None:
    """One line is added to a list of lines."""
    assert toml_text.append_item(text, ("x",), "i") == wanted


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ("x = 1\ny = 2\n", ("x",), "y = 2\n"),
        ("[a]\nx = 1\n\n[a.b]\ny = 1\n\n# c\n[c]\n", ("a", "b"), "[a]\nx = 1\n\n# c\n[c]\n"),
        ("a = {x = 1, y = 2}\n", ("a", "x"), "a = { y = 2}\n"),
        ("x = 1\n", ("nothing", "here"), "x = 1\n"),
    ],
)
def test_a_toml_key_is_taken_out(text: str, path: tuple[str, ...], wanted: str) -> None:
    """With its lines, and no other's."""
    assert toml_text.remove(text, path) == wanted


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ('{"a": 1, "b": 2}', ("a",), '{"b": 2}'),
        ('{"a": 1, "b": 2}', ("b",), '{"a": 1}'),
        ('{"a": {"b": 2}}', ("a", "b"), '{"a": {}}'),
        ('{"a": 1}', ("b", "c"), '{"a": 1}'),
        ('{"a": 1}', ("a", "c"), '{"a": 1}'),
        ('{\n  "a": 1,\n  "b": 2\n}\n', ("a",), '{\n  "b": 2\n}\n'),
    ],
)
def test_a_json_member_is_taken_out(text: str, path: tuple[str, ...], wanted: str) -> None:
    """With its comma."""
    assert json_text.remove(text, path) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = [] # c\n", "x = [] # c\n"),
        ("x = [\n]\n", "x = [\n]\n"),
        ('x = ["a"] # c\n', "x = [] # c\n"),
        ("x = 1\n", "x = []\n"),
        ("x = {}\n", "x = []\n"),
    ],
)
def test_a_toml_list_can_be_emptied(text: str, wanted: str) -> None:
    """One that is empty already keeps its lines."""
    assert document_edits.apply("toml", text, [(("x",), [])]) == wanted


def test_null_is_as_good_as_nothing() -> None:
    """Go's decoder takes it so."""
    text = '{"runtimes": null}'
    changed = document_edits.apply("json", text, [(("runtimes", "x"), {"path": "p"})])
    assert json.loads(changed) == {"runtimes": {"x": {"path": "p"}}}


def test_a_value_on_the_way_is_named() -> None:
    """By its path in the document."""
    with pytest.raises(BadFileError, match=r'has "a\.b", which is not a table'):
        document_edits.apply("toml", "[a]\nb = 1\n", [(("a", "b", "c"), 1)])
