# SPDX-License-Identifier: Apache-2.0
"""Edit the text of a config document, and revert our edits; pure.

A document is one of three kinds: "json", "toml", or "text", which has no structure but lines.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from gpuruntime.engines import json_text, toml_text
from gpuruntime.engines.errors import BadFileError

Kind = Literal["json", "toml", "text"]
Path = tuple[str, ...]
# A path and its new value; None: the path is removed.
Edit = tuple[Path, Any]

EMPTY = {"json": "{}", "toml": "", "text": ""}


def parse(kind: Kind, text: str) -> dict[str, Any]:
    """Return the document in *text*; raise BadFileError if it cannot be parsed."""
    return json_text.parse(text) if kind == "json" else toml_text.parse(text)


def look_up(document: Mapping[str, Any], path: Path) -> Any:  # noqa: ANN401 (any value)
    """Return the value at *path* or None; raise BadFileError if a parent is not a table."""
    value: Any = document
    for depth, part in enumerate(path):
        if value is None:
            break
        if not isinstance(value, dict):
            raise BadFileError(
                f'has "{".".join(path[:depth])}", which is not a table', "correct it"
            )
        value = value.get(part)
    return value


def table_at(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the table at *path*, empty if absent; raise BadFileError if not a table."""
    value = look_up(document, path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadFileError(f'has "{".".join(path)}", which is not a table', "correct it")
    return value


def check_spelling(document: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Raise BadFileError if *document* has a key of one of *paths* in different letter case.

    Go's decoders ignore letter case, some only if no key matches exactly: an engine could use such
    a key instead of the one that we add.
    """
    for path in paths:
        table: Any = document
        for part in path:
            if not isinstance(table, dict):
                break
            for key in table:
                if key != part and key.lower() == part:
                    raise BadFileError(f'has the key "{key}"', f'write it as "{part}"')
            table = table.get(part)


def put(document: dict[str, Any], path: Path, value: Any) -> None:  # noqa: ANN401 (any value)
    """Set *path* in *document* to *value*; None: remove it."""
    for part in path[:-1]:
        document = document.setdefault(part, {})
    if value is None:
        document.pop(path[-1], None)
    else:
        document[path[-1]] = value


def apply(kind: Kind, text: str, edits: Sequence[Edit]) -> str:
    """Return *text* with *edits* applied; a path that already has the value is not rewritten."""
    language = json_text if kind == "json" else toml_text
    for path, value in edits:
        current = look_up(parse(kind, text), path)
        if current == value and type(current) is type(value):
            continue
        if value is None:
            text = language.remove(text, path)
        elif isinstance(value, dict) and isinstance(current, dict):
            inner = [((*path, key), None) for key in current if key not in value]
            inner += [((*path, key), item) for key, item in value.items()]
            text = apply(kind, text, inner)
        else:
            if current is not None and isinstance(current, dict) != isinstance(value, dict):
                text = language.remove(text, path)
            text = _put(kind, text, path, current, value)
    return text


def _put(kind: Kind, text: str, path: Path, current: Any, value: Any) -> str:  # noqa: ANN401
    if kind == "json":
        return json_text.assign(text, path, value)
    if isinstance(current, list) and isinstance(value, list) and value and value[:-1] == current:
        return toml_text.append_item(text, path, value[-1])
    return toml_text.assign(text, path, value)


def without(kind: Kind, text: str | None, original: str | None, written: str) -> str | None:
    """Return *text* with the changes from *original* to *written* reverted; None: no file.

    Later changes by others are kept. Raises BadFileError if a text cannot be parsed.
    """
    if text is None or text == written:
        return original if text is not None else None
    if kind == "text":
        return _without_lines(text, original, written)
    before = parse(kind, original) if original is not None else {}
    ours = parse(kind, written)
    reverts = list(_reverts((), before, ours, parse(kind, text)))
    text = apply(kind, text, reverts)
    text = _prune(kind, text, before, ours)
    is_bare = not _leaves(parse(kind, text)) and "#" not in text
    return None if original is None and is_bare else text


def is_same(kind: Kind, one: str | None, other: str | None) -> bool:
    """Return whether the two texts have the same values."""
    if one is None or other is None or kind == "text":
        return one == other
    return repr(_sorted(parse(kind, one))) == repr(_sorted(parse(kind, other)))


def _sorted(value: Any) -> Any:  # noqa: ANN401 (any value)
    """Return *value* with sorted keys; in its repr() true is not 1, and nan equals nan."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _reverts(
    path: Path, before: Mapping[str, Any], ours: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[Edit]:
    """Return the edits of *now* that revert the changes from *before* to *ours*."""
    for key in {**ours, **before}:
        old, written, current = before.get(key), ours.get(key), now.get(key)
        if old == written:
            continue
        if isinstance(written, dict) and isinstance(current, dict):
            yield from _reverts(
                (*path, key), old if isinstance(old, dict) else {}, written, current
            )
        elif current == written:
            yield (*path, key), old
        elif isinstance(written, list) and isinstance(current, list):
            original = old if isinstance(old, list) else []
            remaining = [item for item in current if item not in written or item in original]
            yield (*path, key), remaining if remaining or old is not None else None


def _prune(kind: Kind, text: str, before: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return *text* without the tables of *ours* that are empty and did not exist *before*."""
    for path in sorted(_tables((), ours), key=len, reverse=True):
        document = parse(kind, text)
        try:
            if look_up(document, path) == {} and look_up(before, path) is None:
                text = apply(kind, text, [(path, None)])
        except BadFileError:
            # Somebody has replaced a parent table by another value.
            continue
    return text


def _tables(path: Path, table: Mapping[str, Any]) -> Iterator[Path]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield (*path, key)
            yield from _tables((*path, key), value)


def _leaves(table: Mapping[str, Any]) -> bool:
    """Return whether *table* has any value besides its version."""
    return any(
        _leaves(value) if isinstance(value, dict) else True
        for key, value in table.items()
        if key != "version"
    )


def _without_lines(text: str, original: str | None, written: str) -> str | None:
    """Return *text* without the lines that *written* added, for each block that is unchanged."""
    old = (original or "").splitlines(keepends=True)
    new = written.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, _, _, begin, end in reversed(matcher.get_opcodes()):
        if tag == "equal":
            continue
        piece = "".join(new[begin:end])
        # Newlines at the ends may belong to a neighbouring line.
        piece = piece if piece in text else piece.strip("\n")
        if not piece or piece not in text:
            continue
        text = text.replace(piece, "", 1)
    return None if original is None and not text.strip() else text


def difference(before: str | None, after: str | None, path: str) -> str:
    """Return a unified diff of the file *path*."""
    old, new = (_lines(text) for text in (before, after))
    names = ["/dev/null" if text is None else path for text in (before, after)]
    return "".join(difflib.unified_diff(old, new, names[0], names[1]))


def _lines(text: str | None) -> list[str]:
    lines = (text or "").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n\\ No newline at end of file\n"
    return lines
