# SPDX-License-Identifier: Apache-2.0
"""A file below /run/gpuruntime that cannot be written whole stays as it was, for all others."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

OLD, NEW = b"old", b"n" * 4096
# All that is needed is loaded before the limit holds.
WRITE = f"""
import resource, sys
from gpuruntime.snapshots import storage
directory, limit, value = sys.argv[1], *map(int, sys.argv[2:])
resource.setrlimit(limit, (value, value))
storage.replace(directory, "x", {NEW!r})
"""


@pytest.mark.parametrize(
    ("limit", "value", "expected"),
    [
        (resource.RLIMIT_FSIZE, len(NEW), NEW),
        (resource.RLIMIT_FSIZE, len(NEW) - 1, OLD),
        (resource.RLIMIT_NOFILE, 3, OLD),
    ],
)
def test_a_create_with_too_little_leaves_the_file_as_it_was(
    tmp_path: Path, limit: int, value: int, expected: bytes
) -> None:
    """Neither half a file nor a temporary one: a limit costs that create time, and no other."""
    tmp_path.chmod(0o755)
    (tmp_path / "x").write_bytes(OLD)
    arguments = [str(tmp_path), str(limit), str(value)]
    subprocess.run([sys.executable, "-c", WRITE, *arguments], check=True)
    assert (tmp_path / "x").read_bytes() == expected
    assert os.listdir(tmp_path) == ["x"]
