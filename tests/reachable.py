# SPDX-License-Identifier: Apache-2.0
"""Whether other users may read this tree: hooks in user namespaces and rootless engines must."""

from __future__ import annotations

from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
IS_REACHABLE = all(path.stat().st_mode & 0o001 for path in (TREE, *TREE.parents))
by_others = pytest.mark.skipif(not IS_REACHABLE, reason=f'"{TREE}" is not open to others')
