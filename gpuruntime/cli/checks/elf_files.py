# SPDX-License-Identifier: Apache-2.0
"""Find damaged ELF files with pyelftools, which reads more than discovery and the hooks do."""

from __future__ import annotations

import os
from typing import BinaryIO


def damage(file: BinaryIO) -> str:
    """Return how the ELF file *file* is damaged, "" if it is not.

    A library that was truncated by a full disk or a broken download may still have all its
    symbols; a program that uses it is killed by a signal.
    """
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415 (large)

    size = os.fstat(file.fileno()).st_size
    try:
        segments = ELFFile(file).iter_segments()
        end = max(
            (s["p_offset"] + s["p_filesz"] for s in segments if s["p_type"] == "PT_LOAD"),
            default=0,
        )
    except Exception as error:  # noqa: BLE001 (pyelftools raises anything for a damaged file)
        return f"is damaged: {type(error).__name__}: {error}"
    return f"is truncated: it has {size} of {end} bytes" if end > size else ""
