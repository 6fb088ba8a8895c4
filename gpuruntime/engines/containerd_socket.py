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
# An uncompressed message without fields.
_NOTHING = bytes(5)


def major_version(path: str) -> int | None:
    """Return the major version of the containerd at the socket *path*.

    None if there is no response, or not one of this protocol.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(path)
            response = _call(connection)
    except OSError:
        return None
    # After five bytes of gRPC, field number 1 of the message is a string: the version.
    if response[5:6] != b"\x0a":
        return None
    match = re.match(rb"v?([0-9]{1,4})\.", response[7:])
    return int(match.group(1)) if match else None


def _call(connection: socket.socket) -> bytes:
    block = b"".join(_literal(name) + _literal(value, b"") for name, value in _FIELDS)
    connection.sendall(
        _PREFACE
        + _frame(_SETTINGS, 0, 0)
        + _frame(_HEADERS, _END_HEADERS, _STREAM, block)
        + _frame(_DATA, _END_STREAM, _STREAM, _NOTHING)
    )
    response = b""
    for _ in range(MAX_FRAMES):
        head = _receive(connection, 9)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        payload = _receive(connection, size)
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            reply = payload if kind == _PING else b""
            connection.sendall(_frame(kind, _ACK, 0, reply))
        if kind == _DATA:
            response += payload
        if stream == _STREAM and (flags & _END_STREAM or kind not in (_DATA, _HEADERS)):
            break
    return response


def _literal(text: str, kind: bytes = b"\0") -> bytes:
    """Return *text* as an HPACK string; *kind* is the prefix: a literal that is not indexed."""
    return kind + bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the connection was closed by the server")
        data += chunk
    return data
