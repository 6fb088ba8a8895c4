# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of a node's services."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a directory with a short path, for sockets, which every user can search."""
    path = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)
