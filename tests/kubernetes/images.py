# SPDX-License-Identifier: Apache-2.0
"""The image of `make image`, for tests that use it if it is there and current."""

from __future__ import annotations

import functools
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
# The root directory that the image was made of.
TREE = SOURCE / "build/image/tree"
_PACKAGES = ("cdi", "gpunode", "gpuruntime", "hooks")


@functools.cache
def current() -> Path | None:
    """Return the archive, None if it is missing or older than a module of ours."""
    sources = [path for name in _PACKAGES for path in (SOURCE / name).rglob("*.py")]
    newest = max(path.stat().st_mtime for path in sources)
    archives = (SOURCE / "build/image").glob("gpu-node-*.tar")
    return next((path for path in archives if path.stat().st_mtime > newest), None)
