# SPDX-License-Identifier: Apache-2.0
"""`docs/reference/bug-reports.md` and the tests of bug reports name each other."""

from __future__ import annotations

import re
from pathlib import Path

TREE = Path(__file__).parents[2]
DOCUMENT = TREE / "docs" / "reference" / "bug-reports.md"
FILES = ("test_bug_reports.py", "test_request_reports.py")


def _rows() -> list[list[str]]:
    lines = re.findall(r"^\| (B[0-9]{3} .*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return [line.split(" | ") for line in lines]


def test_every_test_has_a_row_and_every_row_a_test() -> None:
    """A row without a test is of something that is not there, and says so."""
    rows = _rows()
    assert all(len(row) == 5 for row in rows)
    named = [test.strip("`") for _, _, _, test, _ in rows if test != "-"]
    texts = [(TREE / "tests" / "system" / name).read_text() for name in FILES]
    found = [re.findall(r"^def (test_b[0-9]{3}_\w+)\(", text, re.MULTILINE) for text in texts]
    assert all(len(names) > 15 for names in found)
    there = [name for names in found for name in names]
    assert sorted(named) == sorted(there)
    for report, _, here, test, observed in rows:
        assert test == "-" or test.startswith(f"`test_{report.lower()}_")
        assert test != "-" or here.startswith("Not yet: ")
        assert (test == "-") == (observed == "-")


def test_reports_are_in_order_and_once() -> None:
    """Who looks for one finds it, with what became of it."""
    reports = [row[0] for row in _rows()]
    assert reports == sorted(set(reports))
