# SPDX-License-Identifier: Apache-2.0
"""Links in the documents lead somewhere, and from the README to each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
START = TREE / "README.md"
DOCUMENTS = sorted([*TREE.glob("*.md"), *(TREE / "docs").rglob("*.md")])


def _links(document: Path) -> list[tuple[Path, str]]:
    """Return file and anchor of each link in *document* that is no address."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        if "://" not in path:
            found.append(((document.parent / path).resolve() if path else document, anchor))
    return found


def _anchors(document: Path) -> set[str]:
    """Return the anchors of the headings of *document*."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(TREE)))
def test_links_lead_somewhere(document: Path) -> None:
    """A page that was renamed must not be missed."""
    for path, anchor in _links(document):
        assert path.exists(), f"{document} names {path}"
        assert not anchor or anchor in _anchors(path), f"{document} names {path}#{anchor}"


def test_every_document_is_reached_from_the_readme() -> None:
    """Who does not know that a page is there does not read it."""
    reached: set[Path] = set()
    ahead = [START]
    while ahead:
        document = ahead.pop()
        if document not in reached:
            reached.add(document)
            ahead += [path for path, _ in _links(document) if path.suffix == ".md"]
    assert [path for path in DOCUMENTS if path not in reached] == []
