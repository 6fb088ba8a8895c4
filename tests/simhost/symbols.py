# SPDX-License-Identifier: Apache-2.0
"""Make a library old: take functions out of a compiled one."""

from __future__ import annotations

from collections.abc import Iterable


def without(library: bytes, names: Iterable[str]) -> bytes:
    """Return the ELF file *library* in which nobody finds the functions *names*.

    They are renamed in place; the hash table that the loader searches knows the old names only.
    Raises ValueError for a name that is not there.
    """
    for name in names:
        old = b"\0" + name.encode("ascii") + b"\0"
        if not name.startswith("nvml") or old not in library:
            raise ValueError(f'NVML has no function "{name}" that could be missing')
        library = library.replace(old, b"\0-" + old[2:])
    return library
