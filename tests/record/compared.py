# SPDX-License-Identifier: Apache-2.0
"""What differs between two recordings, as a summary of unified diffs."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

WIDTH = 200


def compare(old: Path, new: Path, limit: int) -> int:
    """Print what differs, at most *limit* lines of each file; return 1 if anything does."""
    before, after = files(old), files(new)
    differing = 0
    for name in sorted({*before, *after}):
        if name not in after:
            print(f"only in {old}: {name}")
        elif name not in before:
            print(f"only in {new}: {name}")
        else:
            left, right = before[name].read_bytes(), after[name].read_bytes()
            if left == right:
                continue
            print(f"differs: {name}")
            show(left, right, limit)
        differing += 1
    common = len({*before} & {*after})
    print(f"{common} files compared, {differing} differ or are in one recording alone")
    if not common:
        print("nothing was compared: are these recordings?")
    return 1 if differing or not common else 0


def files(recording: Path) -> dict[str, Path]:
    """Return relative path → file."""
    found = (path for path in recording.rglob("*") if path.is_file())
    return {str(path.relative_to(recording)): path for path in found}


def show(left: bytes, right: bytes, limit: int) -> None:
    """Print a unified diff of two files; JSON on one line is spread out."""
    old, new = lines(left), lines(right)
    if old == new:
        # The same values written in another way.
        old, new = ([repr(line) for line in text.splitlines()] for text in (left, right))
    rows = [*difflib.unified_diff(old, new, "old", "new", lineterm="", n=2)][2:]
    for row in rows[:limit]:
        print(f"    {row[:WIDTH]}")
    for before, after in zip(old, new, strict=False):
        at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
        if at > WIDTH:
            start = at - WIDTH // 3
            print(f"    from character {start} of a long line:")
            print(f"    -{before[start : start + WIDTH]}\n    +{after[start : start + WIDTH]}")
            break
    if len(rows) > limit:
        print(f"    … {len(rows) - limit} lines more")


def lines(content: bytes) -> list[str]:
    """Return the lines of a file."""
    text = content.decode(errors="backslashreplace")
    if text.startswith(("{", "[")):
        try:
            text = json.dumps(json.loads(text), indent=1)
        except ValueError:
            pass
    return text.splitlines()
