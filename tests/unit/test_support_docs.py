# SPDX-License-Identifier: Apache-2.0
"""`docs/support.md` names a test for each row, and the test exists; or says "untested"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
DOCUMENT = TREE / "docs" / "support.md"
# Tried by hand: no machine of the tests has one.
BY_HAND = "A real GPU"
SUBJECTS = [
    *("Python", "Low-level runtimes", "Engines", "Distributions", BY_HAND, "Platforms", "Kernels"),
    "Architectures",
]


def rows() -> list[tuple[str, str, str]]:
    """Return what, how far, and shown by, of each row of each table except BY_HAND's."""
    before, _, section = DOCUMENT.read_text().partition(f"\n## {BY_HAND}\n")
    text = before + section[section.index("\n## ") :]
    lines = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert all(len(row) == 3 for row in cells)
    found = [(what, far, shown) for what, far, shown in cells if what != "what"]
    assert len(found) > 40
    return found


def missing(shown: str) -> list[str]:
    """Return what *shown* names that is not there."""
    names = re.findall(r"`([^`]+)`", shown)
    makefile = (TREE / "Makefile").read_text()
    absent = []
    for name in names:
        path, _, test = name.partition("::")
        if name.startswith("make "):
            there = re.search(rf"(?m)^{name[5:]}:", makefile)
        else:
            file = TREE / path
            text = file.read_text() if file.is_file() else ""
            there = re.search(rf"(?m)^(def )?{test}\b *[(=:]", text) if test else None
        if there is None:
            absent.append(name)
    return absent


def test_every_subject_has_a_table() -> None:
    """What was asked for, in this order."""
    assert re.findall(r"(?m)^## (.*)$", DOCUMENT.read_text()) == SUBJECTS


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_tests_that_exist_or_is_untested(row: tuple[str, str, str]) -> None:
    """A test that was renamed must not be missed; nor may a row without one look tried."""
    _, far, shown = row
    assert missing(shown) == []
    assert ("`" in shown) == (far != "")
    assert "`" in shown or shown == "untested"


@pytest.mark.parametrize(
    "shown",
    ["`make dinner`", "`tests/none.py::test_x`", "`tests/system/test_deb.py::test_gone`",
     "`tests/system/test_deb.py`"],
)  # fmt: skip
def test_control_what_is_not_there_is_seen(shown: str) -> None:
    """A row may not name a whole file either: nothing says what of it is meant."""
    assert missing(shown) == [shown.strip("`")]
