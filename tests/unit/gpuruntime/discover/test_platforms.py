# SPDX-License-Identifier: Apache-2.0
"""The table of platforms and the one in `docs/reference/platforms.md` are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuruntime.discover.platforms import PLATFORMS, Marks, nvml_decision

DOCUMENT = Path(__file__).parents[4] / "docs" / "reference" / "platforms.md"


def test_each_row_of_the_table_is_documented() -> None:
    """In the order in which `auto` decides."""
    documented = re.findall(
        r"^\| (\w+) \| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    rows = [tuple(cell.replace("`", '"') for cell in row) for row in documented]
    assert rows == [(row.name, row.mode, row.marks, row.nodes, row.files) for row in PLATFORMS]


@pytest.mark.parametrize(
    ("dxg", "dxcore", "tegra", "parts"),
    [
        ("", "", "", []),
        ('"/dev/dxg"', "", "", ['"/dev/dxg" does not count, because there is no "libdxcore.so"']),
        ('"/dev/dxg"', "/x/libdxcore.so", "", ["the marks of WSL do not count"]),
        ("", "", '"/etc/nv_tegra_release"', ["the marks of Tegra do not count"]),
        ('"/dev/dxg"', "", '"/x"', ["marks of Tegra", '"/dev/dxg" does not count']),
    ],
)
def test_marks_that_do_not_count_are_named(
    dxg: str, dxcore: str, tegra: str, parts: list[str]
) -> None:
    """Each mark of another platform, also an incomplete one."""
    sentence = nvml_decision(Marks(dxg=dxg, dxcore=dxcore, kernel="", tegra=tegra))
    assert bool(sentence) == bool(parts)
    assert all(part in sentence for part in parts)
    assert sentence.count("count") == len(parts)
