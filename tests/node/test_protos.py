# SPDX-License-Identifier: Apache-2.0
"""The generated modules are those of the .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).parents[2]
PLACE = Path("gpunode/kubelet/proto")


def test_generated_modules_are_current(tmp_path: Path) -> None:
    """`make protos` would change nothing."""
    subprocess.run([TREE / "scripts" / "protos", sys.executable, tmp_path], cwd=TREE, check=True)
    generated = {path.name: path.read_text() for path in (tmp_path / PLACE).iterdir()}
    committed = {path.name: path.read_text() for path in (TREE / PLACE).glob("*_pb2.py*")}
    assert generated == committed
    assert len(generated) == 2 * len(list((TREE / PLACE).glob("*.proto")))
