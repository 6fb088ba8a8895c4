# SPDX-License-Identifier: Apache-2.0
"""Libraries with a note of CUDA forward compatibility, as small as can be."""

from __future__ import annotations

import json
import struct

OWNER = b"NVIDIA Corporation\0"
SECTION = b".note.cuda.fwd_compatibility"
NOTE_SECTION, NAMES_SECTION = 7, 3
# What a library of the driver 575.57.08 says of itself.
DRIVERS = (535, 550, 560, 565, 570, 575)
TEXT = json.dumps(
    {"Format": 1, "CUDA Version": "12.9", "Driver": list(DRIVERS), "Device": [1, 2]}
).encode()


def note(text: bytes, owner: bytes = OWNER) -> bytes:
    """Return an ELF note."""
    parts = struct.pack("<III", len(owner), len(text), 1)
    for part in (owner, text):
        parts += part + bytes(-len(part) % 4)
    return parts


def library(text: bytes = TEXT, *, width: int = 2, section: bytes = SECTION) -> bytes:
    """Return a file for no machine with *text* in a note; *width* 1 is 32 bit, 2 is 64 bit."""
    return of_note(note(text), width=width, section=section)


def of_note(content: bytes, *, width: int = 2, section: bytes = SECTION) -> bytes:
    """Return a file with *content* in the section."""
    size, entry = (52, 40) if width == 1 else (64, 64)
    names = b"\0" + section + b"\0.shstrtab\0"
    table = size + len(content) + len(names)
    rows = (
        (0, 0, 0, 0),
        (1, NOTE_SECTION, size, len(content)),
        (len(section) + 2, NAMES_SECTION, size + len(content), len(names)),
    )
    words = "<IIIIIIIIII" if width == 1 else "<IIQQQQIIQQ"
    ident = b"\x7fELF" + bytes((width, 1, 1)) + bytes(9)
    head = "<HHIIIIIHHHHHH" if width == 1 else "<HHIQQQIHHHHHH"
    header = struct.pack(head, 3, 0, 1, 0, 0, table, 0, size, 0, 0, entry, 3, 2)
    return (
        ident + header + content + names
        + b"".join(struct.pack(words, n, k, 0, 0, at, length, 0, 0, 4, 0)
                   for n, k, at, length in rows)
    )  # fmt: skip
