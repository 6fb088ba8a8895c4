# SPDX-License-Identifier: Apache-2.0
"""The subset of the Protocol Buffers encoding that the messages of the CRI need.

A message is a mapping from field numbers to text, bytes, non-negative integers, messages, and
lists of these. Fields with their default value are omitted, as in version 3 of the language.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VARINT, LENGTH = 0, 2
# Wire type → size of a value that is skipped.
FIXED = {1: 8, 5: 4}


def encode(message: Mapping[int, Any]) -> bytes:
    """Return *message* as bytes."""
    return b"".join(part for number in message for part in _fields(number, message[number]))


def decode(data: bytes) -> dict[int, list[int | bytes]]:
    """Return the values of each field in *data*; text and messages are bytes.

    Raises ValueError if *data* is not a message.
    """
    fields: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        key, at = _read_number(data, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == VARINT:
            value, at = _read_number(data, at)
        else:
            if kind == LENGTH:
                size, at = _read_number(data, at)
            elif kind in FIXED:
                size = FIXED[kind]
            else:
                raise ValueError(f"field {number} has the wire type {kind}")
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError(f"field {number} ends after the message")
        fields.setdefault(number, []).append(value)
    return fields


def entries(pairs: Mapping[str, str]) -> list[dict[int, str]]:
    """Return a map of text to text as the list of its messages on the wire."""
    return [{1: key, 2: value} for key, value in pairs.items()]


def _fields(number: int, value: Any) -> Iterator[bytes]:
    if isinstance(value, list):
        for each in value:
            yield from _field(number, each)
    # An empty message differs from an absent one.
    elif value or isinstance(value, Mapping):
        yield from _field(number, value)


def _field(number: int, value: Any) -> Iterator[bytes]:
    if isinstance(value, int):
        yield _number(number << 3 | VARINT) + _number(value)
        return
    if isinstance(value, Mapping):
        value = encode(value)
    elif isinstance(value, str):
        value = value.encode()
    yield _number(number << 3 | LENGTH) + _number(len(value)) + value


def _number(value: int) -> bytes:
    """Return *value* in groups of seven bits, the lowest first; all but the last have bit 7."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _read_number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at *at* in *data*, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("a number ends after the message")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
