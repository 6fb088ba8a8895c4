# SPDX-License-Identifier: Apache-2.0
"""Query the version of a running containerd: one gRPC call, written by hand, on its socket."""

from __future__ import annotations

import re
import socket
import struct

TIMEOUT_S = 5.0
MAX_FRAMES = 64
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_STREAM = 1
_FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/containerd.services.version.v1.Version/Version"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)
# A message of no fields, and that it is not compressed.
_NOTHING = bytes(5)


def major_version(path: str) -> int | None:
    """Return the first number of the version of the containerd at the socket *path*.

    None if nobody answers there, or in no way that is known.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(path)
            answer = _call(connection)
    except OSError:
        return None
    # The field number 1 of the answer, after five bytes of gRPC, is a string.
    if answer[5:6] != b"\x0a":
        return None
    match = re.match(rb"v?([0-9]{1,4})\.", answer[7:])
    return int(match.group(1)) if match else None


def _call(connection: socket.socket) -> bytes:
    block = b"".join(_literal(name) + _literal(value, b"") for name, value in _FIELDS)
    connection.sendall(
        _PREFACE
        + _frame(_SETTINGS, 0, 0)
        + _frame(_HEADERS, _END_HEADERS, _STREAM, block)
        + _frame(_DATA, _END_STREAM, _STREAM, _NOTHING)
    )
    answer = b""
    for _ in range(MAX_FRAMES):
        head = _receive(connection, 9)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        payload = _receive(connection, size)
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            reply = payload if kind == _PING else b""
            connection.sendall(_frame(kind, _ACK, 0, reply))
        if kind == _DATA:
            answer += payload
        if stream == _STREAM and (flags & _END_STREAM or kind not in (_DATA, _HEADERS)):
            break
    return answer


def _literal(text: str, kind: bytes = b"\0") -> bytes:
    """Return a string as HPACK has it; before a name there is that nothing need be remembered."""
    return kind + bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the other side has closed it")
        data += chunk
    return data
