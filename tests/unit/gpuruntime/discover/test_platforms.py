# SPDX-License-Identifier: Apache-2.0
"""The table of platforms and the one in `docs/reference/platforms.md` are the same."""

from __future__ import annotations

import re
from pathlib import Path

from gpuruntime.discover.platforms import PLATFORMS

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "platforms.md"


def test_each_row_of_the_table_is_documented() -> None:
    """In the order in which `auto` decides."""
    documented = re.findall(
        r"^\| (\w+) \| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    rows = [tuple(cell.replace("`", '"') for cell in row) for row in documented]
    assert rows == [(row.name, row.mode, row.marks, row.nodes, row.files) for row in PLATFORMS]
