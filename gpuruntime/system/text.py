# SPDX-License-Identifier: Apache-2.0
"""Turn text into bytes and back as `os` does, without importing it; pure. On the start path."""

from __future__ import annotations


def encode(text: str) -> bytes:
    """Return *text* as os.fsencode does; raise UnicodeEncodeError for half a surrogate pair."""
    return text.encode("utf-8", "surrogateescape")


def decode(data: bytes) -> str:
    """Return *data* as os.fsdecode does."""
    return data.decode("utf-8", "surrogateescape")
