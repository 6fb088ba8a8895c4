# SPDX-License-Identifier: Apache-2.0
"""The bytes of a config.json, in which the contents of some strings are holes; pure.

On the start path, where it is loaded only to record a result for the launcher. A hole is the
content of a string on which no result depends, such as an argument of the container's process. It
never has one of the trigger words. The value of a variable is a hole, and its name is not.
"""

from __future__ import annotations

import os

from cdi import strictjson
from gpuruntime import probes
from gpuruntime.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from cdi.wire import OciConfig

# Kinds of holes: any string, and one without a colon.
ANY, WITHOUT_COLON = b"s", b"c"
# The paths of the strings. An element of a list is "*", and so is a member of these.
_OPEN = frozenset({("annotations",), ("hooks",)})
_ENV = ("process", "env", "*")
_CGROUP = ("linux", "cgroupsPath")
_HOLES = frozenset(
    {
        *(("hostname",), ("domainname",), ("root", "path"), ("annotations", "*"), _ENV, _CGROUP),
        *(("process", "args", "*"), ("process", "cwd"), ("process", "selinuxLabel")),
        *(("mounts", "*", "source"), ("linux", "mountLabel"), ("hooks", "*", "*", "args", "*")),
        ("linux", "namespaces", "*", "path"),
    }
)
# In a hole these stand for one character; launcher/replay.h reads the same ones.
_ESCAPES = (
    *(b"\\\\", b'\\"', b"\\b", b"\\f", b"\\n", b"\\r", b"\\t"),
    *(b"\\u003c", b"\\u003e", b"\\u0026"),
)


class Hole(Record):
    """A hole: bytes *start* to *end* of the data, of a *kind*.

    *path* leads to the string in the document; *before* is its part in front of the hole.
    """

    __slots__ = ("before", "end", "kind", "path", "start")

    def __init__(
        self, start: int, end: int, kind: bytes, path: tuple[Any, ...], before: str
    ) -> None:
        self.start = start
        self.end = end
        self.kind = kind
        self.path = path
        self.before = before


class Template(Record):
    """The config.json *data* with *holes*, in their order."""

    __slots__ = ("_mark", "data", "holes")

    def __init__(self, data: bytes, holes: Sequence[Hole]) -> None:
        self.data = data
        self.holes = holes
        # No name and no value of the data begins like it.
        self._mark = os.urandom(8).hex()

    @property
    def parts(self) -> list[bytes]:
        """The data, by turns bytes and the kind of a hole."""
        parts, end = [], 0
        for hole in self.holes:
            parts += [self.data[end : hole.start], hole.kind]
            end = hole.end
        return [*parts, self.data[end:]]

    def marked(self, document: OciConfig) -> Any:  # noqa: ANN401 (an OCI config)
        """Return a copy of *document*, which the data is, with a mark in each hole."""
        marked: Any = strictjson.loads(strictjson.dumps(document))
        for number, hole in enumerate(self.holes):
            parent = marked
            for key in hole.path[:-1]:
                parent = parent[key]
            parent[hole.path[-1]] = hole.before + self._mark_of(number)
        return marked

    def pieces(self, result: bytes) -> list[bytes] | None:
        """Return *result*, by turns bytes and the number of a hole, where there are marks.

        None if it has not every mark once.
        """
        first, *rest = result.split(b"<" + self._mark.encode() + b"-")
        pieces, numbers = [first], []
        for piece in rest:
            number, _, text = piece.partition(b">")
            pieces += [number, text]
            numbers.append(int(number))
        return pieces if sorted(numbers) == list(range(len(self.holes))) else None

    def filled(self, pieces: list[bytes]) -> bytes:
        """Return *pieces* with what is in the holes of the data, as the launcher does."""
        contents = [self.data[hole.start : hole.end] for hole in self.holes]
        for escape, character in ((b"\\u003c", b"<"), (b"\\u003e", b">"), (b"\\u0026", b"&")):
            # An escaped backslash may be in front.
            contents = [
                b"\\\\".join(part.replace(escape, character) for part in content.split(b"\\\\"))
                for content in contents
            ]
        return b"".join(
            contents[int(piece)] if index % 2 else piece for index, piece in enumerate(pieces)
        )

    def _mark_of(self, number: int) -> str:
        return f"<{self._mark}-{number}>"


def make(data: bytes, document: OciConfig, words: Sequence[bytes]) -> Template | None:
    """Return the template of *data*, which is *document*, a request with one of *words*.

    None if the strings of both do not match.
    """
    spans = list(_spans(data, words))
    strings = list(_strings(document, (), ()))
    if len(spans) != len(strings):
        return None
    holes = []
    for (start, end, has_word), (shape, path, value) in zip(spans, strings):
        if has_word or shape not in _HOLES:
            continue
        if shape[0] in ("annotations", "mounts") and _is_asked_by(document, path, words):
            continue
        hole = _hole(data, start, end, shape, path)
        if hole is None:
            continue
        if strictjson.loads(b'"' + data[start:end] + b'"') != value:
            return None
        holes.append(hole)
    return Template(data, holes)


def number_of(data: bytes, words: Sequence[bytes]) -> int:
    """Return a number of *data* that is the same whatever is in holes.

    It is made of the bytes outside of strings, and of the strings that have one of *words*.
    """
    parts, end = [], 0
    for start, stop, has_word in _spans(data, words):
        parts.append(data[end : start - 1])
        if has_word:
            parts.append(data[start:stop])
        end = stop + 1
    parts.append(data[end:])
    number: int = int.from_bytes(b"".join(parts), "big") % probes.PRIME
    return number


def _hole(
    data: bytes, start: int, end: int, shape: tuple[str, ...], path: tuple[Any, ...]
) -> Hole | None:
    """Return the hole in the string from *start* to *end*, None if it may have none."""
    content, kind = data[start:end], ANY
    if shape == _ENV:
        name, equals, content = content.partition(b"=")
        before = name + equals
        if not equals or b"\\" in name or not name.isascii():
            return None
    elif shape == _CGROUP:
        # With two colons it is a cgroup of systemd.
        before, colon, content = content.rpartition(b":")
        before, kind = before + colon, WITHOUT_COLON
        if b"\\" in before or not before.isascii():
            return None
    else:
        before = b""
    plain = content
    for escape in _ESCAPES:
        plain = plain.replace(escape, b"")
    if b"\\" in plain or not plain.isascii() or not plain.decode().isprintable():
        return None
    return Hole(start + len(before), end, kind, path, before.decode())


def _spans(data: bytes, words: Sequence[bytes]) -> Iterator[tuple[int, int, bool]]:
    """Yield start and end of each string of the JSON *data*, and whether it has one of *words*.

    Quotation marks, which no word has, are not included.
    """
    hits = _positions(data, words)
    start = data.find(b'"') + 1
    while start:
        end = data.find(b'"', start)
        # A quotation mark behind an odd number of backslashes is in the string.
        while (end - start - len(data[start:end].rstrip(b"\\"))) % 2:
            end = data.find(b'"', end + 1)
        has_word = False
        while hits and hits[-1] < end:
            has_word |= hits.pop() >= start
        yield start, end, has_word
        start = data.find(b'"', end + 1) + 1


def _positions(data: bytes, words: Sequence[bytes]) -> list[int]:
    """Return where *words* begin in *data*, the last one first."""
    positions = []
    for word in words:
        start = data.find(word)
        while start >= 0:
            positions.append(start)
            start = data.find(word, start + 1)
    return sorted(positions, reverse=True)


def _strings(
    value: Any,  # noqa: ANN401 (JSON)
    shape: tuple[str, ...],
    path: tuple[Any, ...],
) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...], str]]:
    """Yield shape, path and value of each string in *value*, in order.

    Names of members are strings, too; their shape is empty.
    """
    is_object = isinstance(value, dict)
    members: Any = value.items() if is_object else enumerate(value)
    for key, child in members:
        if is_object:
            yield (), path, key
        part = key if is_object and shape not in _OPEN else "*"
        if isinstance(child, str):
            yield (*shape, part), (*path, key), child
        elif isinstance(child, (dict, list)):
            yield from _strings(child, (*shape, part), (*path, key))


def _is_asked_by(document: OciConfig, path: tuple[Any, ...], words: Sequence[bytes]) -> bool:
    """Return whether the annotation or mount with the string at *path* has one of *words*."""
    whole: Any = document
    for part in path[:2]:
        whole = whole[part]
    return _has_word(strictjson.dumps([path, whole], ascii_only=False).encode(), words)


def _has_word(text: bytes, words: Sequence[bytes]) -> bool:
    return any(word in text for word in words)
