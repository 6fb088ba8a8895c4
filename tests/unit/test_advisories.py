# SPDX-License-Identifier: Apache-2.0
"""META-03: `docs/reference/advisories.md` has every advisory, with its tests or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.catalogue("META-03")
TREE = Path(__file__).parents[2]
DOCUMENT = TREE / "docs" / "reference" / "advisories.md"
# Year → the numbers of the advisories that there are for container tools, CDI and Python.
KNOWN = {
    "2007": "4559",
    "2017": "18342",
    "2018": "15664",
    "2019": "14271 16884 18837 19921 5736",
    "2020": "10735 14343 15257 1747",
    "2021": "1056 30465",
    "2022": "23648 27650 29162 42919 4318",
    "2023": "27561 28642 6597",
    "2024": "0132 0133 0134 0135 0136 0137 12718 1753 21626 25621 3154 40635 45310 5154 9676",
    "2025": "13462 23260 23266 23267 23359 31133 4138 4330 4435 4517 47290 52565 52881 8194",
    "2026": "12345 24176 24177 24260 30892 41567 41568 41579 42306 47483 47766 53488 53489 53492 "
    "76061 79705 88264 88265",
}
REASON = "does not apply: "


def rows() -> dict[str, str]:
    """Return advisory → what the document says that answers it."""
    lines = re.findall(r"^\| (CVE-\S+) \| (.+) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(lines) == len({name for name, _, _ in lines})
    return {name: answer for name, _, answer in lines}


def test_every_advisory_is_there() -> None:
    """And none besides: a list that is not looked after proves nothing."""
    known = {f"CVE-{year}-{number}" for year, text in KNOWN.items() for number in text.split()}
    assert set(rows()) == known


def test_tests_that_are_named_exist() -> None:
    """In the file that is named, as a function."""
    named = 0
    for answer in rows().values():
        for path, test in re.findall(r"`(tests/\S+\.py)::(\w+)`", answer):
            named += 1
            assert re.search(rf"^def {test}\(", (TREE / path).read_text(), re.MULTILINE), test
    assert named > 50


def test_without_tests_there_is_a_reason() -> None:
    """One or the other, and a reason by another advisory is by one that has its own."""
    answers = rows()
    for answer in answers.values():
        assert answer.startswith(REASON) != answer.startswith("`tests/")
        other = re.fullmatch(rf"{REASON}as (CVE-\S+)", answer)
        assert other is None or not answers[other[1]].startswith(f"{REASON}as ")
