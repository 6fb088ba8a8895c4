# SPDX-License-Identifier: Apache-2.0
"""The documents use the glossary's words, and none of those that it replaces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
GLOSSARY = TREE / "docs" / "glossary.md"
SECTION = "## Words that are not used"
# A decision is not edited afterwards, and neither are its words.
DECISIONS = TREE / "docs" / "adr"
PAGES = sorted(
    path
    for path in [*TREE.glob("*.md"), *(TREE / "docs").rglob("*.md")]
    if DECISIONS not in path.parents
)


def replaced_words() -> list[str]:
    """Return the words in the first column of the glossary's table."""
    table = GLOSSARY.read_text().partition(SECTION)[2]
    return [
        word
        for row in re.findall(r"(?m)^\| (`.+`) \| [^`|]+ \|$", table)
        for word in re.findall(r"`([^`]+)`", row)
    ]


def prose(text: str) -> str:
    """Return *text* without code blocks, code in a line, and the glossary's table."""
    text = text.partition(SECTION)[0]
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", text)
    text = re.sub(r"`[^`]*`", "``", text)
    return re.sub(r"\s+", " ", text)


def uses(words: list[str], text: str) -> list[str]:
    """Return which of *words* the prose of *text* has."""
    return [word for word in words if re.search(rf"\b{re.escape(word)}\b", prose(text))]


def test_the_table_is_read() -> None:
    """A row in another form would be left out silently."""
    words = replaced_words()
    assert len(words) > 30
    assert len(words) == len(set(words))
    rows = GLOSSARY.read_text().partition(SECTION)[2].count("\n| `")
    assert rows == len(re.findall(r"(?m)^\| (`.+`) \| [^`|]+ \|$", GLOSSARY.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(TREE)))
def test_a_page_has_no_other_word_for_a_thing_of_the_glossary(page: Path) -> None:
    """A reader who meets two words looks for two things."""
    assert uses(replaced_words(), page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("by the loader's\ncache.", ["loader's cache"]),
        ("by the `loader's cache`", []),
        ("```console\nloader's cache\n```", []),
        ("the loader cache", []),
        ("spec files", ["spec files"]),
        ("a profile", []),
    ],
)
def test_words_are_found_in_prose(text: str, used: list[str]) -> None:
    """Also across a line break; not in what a command prints."""
    assert uses(replaced_words(), text) == used
