# SPDX-License-Identifier: Apache-2.0
"""Messages on the wire; the bytes are from the documentation of the encoding."""

from __future__ import annotations

import pytest
from containers.cri import wire
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("message", "data"),
    [
        ({}, ""),
        ({1: 150}, "089601"),
        ({2: "testing"}, "120774657374696e67"),
        ({3: {1: 150}}, "1a03089601"),
        ({4: [3, 270]}, "2003208e02"),
        ({1: 0, 2: "", 3: []}, ""),
        ({3: {}}, "1a00"),
        ({16: True}, "800101"),
    ],
)
def test_a_message_becomes_these_bytes(message: dict[int, object], data: str) -> None:
    """Numbers in groups of seven bits; other values are preceded by their length."""
    assert wire.encode(message).hex() == data


@given(
    st.dictionaries(
        st.integers(1, 2**20),
        st.lists(st.integers(0, 2**64 - 1) | st.binary(), min_size=1),
    )
)
def test_what_is_encoded_is_decoded(message: dict[int, list[int | bytes]]) -> None:
    """Lists keep default values, so that all values are decoded."""
    assert wire.decode(wire.encode(message)) == message


def test_fields_of_a_fixed_size_are_passed_over() -> None:
    """The CRI uses them in fields that the client does not read."""
    fields = wire.decode(bytes.fromhex("0901020304050607080d01020304") + wire.encode({2: 7}))
    assert fields[2] == [7]


@pytest.mark.parametrize("data", ["08", "0896", "1207746573", "0b", "0901"])
def test_what_is_no_message_is_refused(data: str) -> None:
    """Truncated, or with an obsolete wire type."""
    with pytest.raises(ValueError, match=r"ends after the message|wire type"):
        wire.decode(bytes.fromhex(data))


def test_a_map_is_a_list_of_pairs() -> None:
    """Annotations and labels."""
    assert wire.entries({"a": "1", "b": ""}) == [{1: "a", 2: "1"}, {1: "b", 2: ""}]
