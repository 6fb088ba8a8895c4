# SPDX-License-Identifier: Apache-2.0
"""The reports about Kubernetes in `docs/reference/bug-reports.md` name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TREE = Path(__file__).parents[3]
DOCUMENT = TREE / "docs" / "reference" / "bug-reports.md"
# Of the reports that were collected, these have a test.
REPORTS = set(range(1, 29))


def test_every_report_has_a_row_and_each_row_tests_that_exist() -> None:
    """A test that was renamed must not be missed."""
    rows = re.findall(r"^\| K([0-9]{2}) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == sorted(REPORTS)
    for number, row in rows:
        tests = re.findall(r"`((?:unit|node|property)/[a-z_/]+\.py)::(\w+)`", row)
        assert tests, number
        for path, function in tests:
            text = (TREE / "tests" / path).read_text()
            assert re.search(rf"^(?:async )?def {function}\(", text, re.MULTILINE), function
