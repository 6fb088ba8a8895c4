# SPDX-License-Identifier: Apache-2.0
"""fakenvml.conf, changed while processes have the fake NVML loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class NvmlFile:
    """The file at *path*; every change replaces it, so that nobody reads half of it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[str]:
        """Return the lines of the file."""
        return self._path.read_text().splitlines()

    def replace(self, lines: Iterable[str]) -> None:
        """Have the file consist of *lines*; the times in them count from now."""
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh.write_text("".join(f"{line}\n" for line in lines))
        fresh.replace(self._path)
