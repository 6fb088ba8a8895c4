# SPDX-License-Identifier: Apache-2.0
"""`docs/reference/bug-reports.md` and the tests of bug reports name each other."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
SYSTEM = TREE / "tests" / "system"
DOCUMENT = TREE / "docs" / "reference" / "bug-reports.md"
# Each test of these is of one report, and has its row.
FILES = ("test_bug_reports.py", "test_request_reports.py", "test_hook_reports.py")
DOCTOR = "test_doctor.py"


def _rows() -> list[list[str]]:
    lines = re.findall(r"^\| (B[0-9]{3} .*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return [line.split(" | ") for line in lines]


@functools.cache
def _of_the_doctor() -> list[tuple[str, str]]:
    """Return the reports in the doctor's table, each with its line."""
    (table,) = (
        node.value
        for node in ast.parse((SYSTEM / DOCTOR).read_text()).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "REPORTS"
    )
    assert isinstance(table, ast.List)
    rows = [row.elts for row in table.elts if isinstance(row, ast.Tuple)]
    return [(ast.literal_eval(row[0]), ast.literal_eval(row[3])) for row in rows]


def test_every_test_has_a_row_and_every_row_a_test() -> None:
    """A row without a test is of something that is not there, and says so."""
    rows = _rows()
    assert all(len(row) == 5 for row in rows)
    named = [name for row in rows for name in re.findall(r"`(test_b[0-9]{3}_\w+)`", row[3])]
    texts = [(SYSTEM / name).read_text() for name in FILES]
    found = [re.findall(r"^def (test_b[0-9]{3}_\w+)\(", text, re.MULTILINE) for text in texts]
    assert all(len(names) > 15 for names in found)
    assert sorted(named) == sorted(name for names in found for name in names)
    for report, _, here, test, observed in rows:
        assert test != "-" or here.startswith("Not yet: ")
        assert (test == "-") == (observed == "-")
        for name in re.findall(r"\btest_(b[0-9]{3})_", test):
            assert name == report.lower()


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row[0])
def test_what_a_row_names_is_there(row: list[str]) -> None:
    """A test that was renamed must not be missed, nor a line of the doctor that has changed."""
    report, _, _, test, observed = row
    told = _of_the_doctor()
    for name in re.findall(r"`([^`]*)`", test):
        if name == f"{DOCTOR} -k {report}":
            assert report in {of for of, _ in told}
        elif "::" in name:
            path, _, function = name.partition("::")
            file = TREE / path if "/" in path else SYSTEM / path
            assert re.search(rf"^ *def {function}\(", file.read_text(), re.MULTILINE), name
        else:
            assert name.startswith("test_b"), name
    if re.match("`(ok|warn|fail) ", observed) and f"-k {report}`" in test:
        assert (report, observed.strip("`")) in told


def test_all_reports_of_the_doctor_have_a_row() -> None:
    """What comes often is what people look for; K is about Kubernetes, with rows of its own."""
    known = {row[0] for row in _rows()}
    frequent = {report for report, _ in _of_the_doctor() if not report.startswith("K")}
    # B149 comes seldom, and is the driver's: the doctor alone has it.
    assert frequent - known == {"B149"}


def test_reports_are_in_order_and_once() -> None:
    """Who looks for one finds it, with what became of it."""
    reports = [row[0] for row in _rows()]
    assert reports == sorted(set(reports))
