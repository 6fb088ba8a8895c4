# SPDX-License-Identifier: Apache-2.0
"""What replaces the package `json` on the start path reads and writes as that does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi import strictjson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# What JSON is made of, in any order.
TEXTS = st.lists(
    st.sampled_from(
        [
            *("{", "}", "[", "]", ":", ",", '"', '"a"', "\\", '"\\u00e9"', '"\\ud83d\\ude00"'),
            *('"\\ud800"', '"\\x"', '"\n"', "\x00", "é", " ", "\t", "\r\n", "\f", "\ufeff"),
            *("0", "-0", "01", "1.5", "1e400", "-", ".", "1.", "true", "nul", "NaN", "-Infinity"),
        ]
    ),
    max_size=9,
).map("".join)


def came_to(function: Callable[[], Any]) -> object:
    """Return the result of *function*, with floats as they are written, or that it refused."""
    try:
        return repr(function())
    except (ValueError, TypeError) as error:
        return TypeError if isinstance(error, TypeError) else ValueError


@given(TEXTS)
def test_text_is_read_or_refused_as_by_json(text: str) -> None:
    """Also with the hooks that tell repeated members."""
    assert came_to(lambda: strictjson.loads(text)) == came_to(lambda: json.loads(text))
    assert came_to(lambda: strictjson.loads(text, pairs=list, parse_float=str)) == came_to(
        lambda: json.loads(text, object_pairs_hook=list, parse_float=str)
    )


@given(VALUES, st.booleans())
def test_values_are_written_as_by_json_and_read_again(value: object, ascii_only: bool) -> None:
    """NaN and infinity are none of JSON's."""
    wanted = came_to(
        lambda: json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=ascii_only)
    )
    assert came_to(lambda: strictjson.dumps(value, ascii_only=ascii_only)) == wanted
    written = json.dumps(value, separators=(",", ":"))
    assert strictjson.dumps(value, allow_nan=True) == written
    assert repr(strictjson.loads(written)) == repr(json.loads(written))


@pytest.mark.parametrize("text", ["", " ", "[", '{"a"', '{"a":1,}', "[1] x", "1 2", "\ufeff1"])
def test_what_is_no_json_is_refused(text: str) -> None:
    """With the same class of error."""
    with pytest.raises(ValueError, match=r"."):
        strictjson.loads(text)


def test_bytes_are_utf_8() -> None:
    """`json` guesses other encodings, which no reader of OCI configs or CDI specs does."""
    assert strictjson.loads('"é"'.encode()) == "é"
    for data in (b'"\xe9"', '"é"'.encode("utf-16")):
        with pytest.raises(UnicodeDecodeError):
            strictjson.loads(data)


def test_constants_can_be_refused() -> None:
    """NaN is not JSON; `json` takes it by default, and so does this."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    assert math.isnan(strictjson.loads("NaN"))
    with pytest.raises(ValueError, match="NaN"):
        strictjson.loads("[NaN]", parse_constant=refuse)


def test_depth_ends_in_a_recursion_error() -> None:
    """Not in the end of the process."""
    with pytest.raises(RecursionError):
        strictjson.loads("[" * 100_000)
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match=r"."):
        strictjson.dumps(circle)


def test_what_json_has_not_is_a_type_error() -> None:
    """Rather than something that looks like it."""
    with pytest.raises(TypeError, match="set is not a JSON value"):
        strictjson.dumps({"a": {1}})
    assert strictjson.dumps({"a": {1}}, default=list) == '{"a":[1]}'
