# SPDX-License-Identifier: Apache-2.0
"""Frames on the pipes between the watcher and its child: a length in four bytes, then JSON.

Imports only what the child has anyway, whose memory every node pays for.
"""

from __future__ import annotations

import os

from cdi import strictjson

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BYTES = 16 << 20
_LENGTH_BYTES = 4


class FrameError(Exception):
    """The bytes are not a frame, or not one that the receiver accepts."""


def encode(message: dict[str, Any]) -> bytes:
    """Return the frame of *message*; raise ValueError or TypeError if it is not JSON."""
    data = strictjson.dumps(message).encode()
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Decoder:
    """Bytes as they arrive → messages, each of at most *max_bytes* with its length."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._data = b""
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that are complete with *data*; raise FrameError."""
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if end > self._max_bytes:
                raise FrameError(f"a frame of {end} bytes")
            if len(self._data) < end:
                break
            try:
                messages.append(strictjson.loads(self._data[_LENGTH_BYTES:end]))
            except (ValueError, RecursionError) as error:
                raise FrameError(f"not valid JSON: {error}") from None
            self._data = self._data[end:]
        return messages


def read(descriptor: int) -> Any:  # noqa: ANN401 (JSON)
    """Return the next message; None at the end of input. Raises FrameError and OSError."""
    header = _read_all(descriptor, _LENGTH_BYTES)
    if not header:
        return None
    body = b""
    if len(header) == _LENGTH_BYTES:
        body = _read_all(descriptor, min(int.from_bytes(header, "big"), MAX_BYTES))
    messages = Decoder().feed(header + body)
    if not messages:
        raise FrameError("the input ends within a frame")
    return messages[0]


def write(descriptor: int, message: dict[str, Any]) -> None:
    """Write *message*; raise OSError."""
    view = memoryview(encode(message))
    while view:
        view = view[os.write(descriptor, view) :]


def _read_all(descriptor: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(descriptor, length - len(data))
        if not chunk:
            break
        data += chunk
    return data
