# SPDX-License-Identifier: Apache-2.0
"""Which tests are likely to catch a patch: those that speak of what it changes.

A word that few tests have says more than one that many have, and more in a short file. Nothing is
left out by that; it is the order in which tests run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+(\d+)")
_DEFINITION = re.compile(r"(?:\s*(?:async )?def |class |static |\w.*\)$)")
# How much more a changed line says than those around it.
_CHANGED = 3


def words_of(diff: str, place: Path) -> Counter[str]:
    """Return the words that the patch *diff* of the tree *place* is about, and their weights."""
    found: Counter[str] = Counter()
    lines: list[str] = []
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = place / line[4:].split("\t")[0].removeprefix("b/")
            lines = path.read_text().splitlines() if path.is_file() else []
        elif match := _HUNK.match(line):
            # The definition that the first lines are in, which are of the context.
            above = lines[: int(match[1]) + 2]
            inside = next((text for text in reversed(above) if _DEFINITION.match(text)), "")
            found.update(dict.fromkeys(_WORD.findall(inside), _CHANGED))
        elif not line.startswith("---"):
            weight = _CHANGED if line[:1] in ("+", "-") else 1
            found.update(dict.fromkeys(_WORD.findall(line[1:]), weight))
    return found


def ranked(names: list[str], words: Counter[str], place: Path) -> list[str]:
    """Return the test files *names* of the tree *place*, the likeliest first."""
    texts = {name: set(_WORD.findall(_text(place / name, place))) for name in names}
    files = Counter(word for text in texts.values() for word in text & words.keys())
    score = {
        name: sum(words[w] * math.log(len(names) / files[w]) for w in text & words.keys())
        for name, text in texts.items()
    }
    return sorted(names, key=lambda name: -score[name] / math.sqrt(len(texts[name]) + 1))


def _text(path: Path, place: Path) -> str:
    """Return the test file *path*, and the programs that it names."""
    text = path.read_text()
    for name in set(re.findall(r'"(\w+\.py)"', text)):
        for folder in ("scenarios", "hostile", "containers"):
            program = place / "tests" / folder / name
            text += program.read_text() if program.is_file() else ""
    return text
