# SPDX-License-Identifier: Apache-2.0
"""Read CDI specs as YAML 1.1; the only module that imports yaml.

Reading uses the parser's events, not PyYAML's constructors, which read some scalars differently
from the readers in Go (`y`, `0o17`, `1e3`, `1:30`) and make objects that JSON does not have.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from cdi import document
from cdi.errors import CdiError
from cdi.registry import MAX_VALUES

MAX_DEPTH = 64

# The C parser if installed: it is faster, and accepts tabs between flow tokens, as Go's does.
_PARSER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"


def _cases(words: str) -> tuple[str, ...]:
    """Return each of *words* in lower case, capitalised and in upper case."""
    return tuple(f(word) for word in words.split() for f in (str.lower, str.capitalize, str.upper))


_WORDS: dict[str, object] = {
    **dict.fromkeys(("", "~", *_cases("null")), None),
    **dict.fromkeys(_cases("y yes true on"), True),
    **dict.fromkeys(_cases("n no false off"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((f"{s}{word}" for s in ("", "+") for word in _cases(".inf")), float("inf")),
    **dict.fromkeys((f"-{word}" for word in _cases(".inf")), float("-inf")),
}
# `str.capitalize` does not change ".inf".
_WORDS.update({".Inf": float("inf"), "+.Inf": float("inf"), "-.Inf": float("-inf")})
_INTEGER = re.compile(
    r"(?P<sign>[-+]?)(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<bin>[01]+)"
    r"|0[oO]?(?P<oct>[0-7]+)|(?P<dec>0|[1-9][0-9]*))\Z"
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# The most characters of an integer; a longer number is a float at best.
_MAX_INTEGER_CHARS = 80


def decode(text: str, lines: dict[tuple[str | int, ...], int] | None = None) -> object:
    """Return the first document of *text*; raise CdiError if it is not the YAML of a CDI spec.

    *lines* receives the line, from 1, of each member and item by its path.
    """
    try:
        return _Reader(text, lines).document()
    except yaml.YAMLError as error:
        raise _of_yaml(error) from error


def _of_yaml(error: yaml.YAMLError) -> CdiError:
    mark = getattr(error, "problem_mark", None)
    line = f"line {mark.line + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return CdiError("syntax", f"{line}{problem}")


def decode_all(texts: dict[str, str]) -> dict[str, Any]:
    """Return path → document, or a CdiError in its place, for each path → text."""
    documents: dict[str, Any] = {}
    for path, text in texts.items():
        try:
            documents[path] = decode(text)
        except CdiError as error:
            documents[path] = error
    return documents


def decode_documents(text: str) -> list[object]:
    """Return all documents of *text*, read as by Kubernetes and compose; raise CdiError.

    Unlike in a CDI spec, a key may override a merged one, and custom tags have no effect.
    """
    try:
        return _ManifestReader(text, None).documents()
    except yaml.YAMLError as error:
        raise _of_yaml(error) from error


class _Reader:
    """A decoder of a parser's events that refuses what Go's strict reader refuses."""

    def __init__(self, text: str, lines: dict[tuple[str | int, ...], int] | None) -> None:
        self.parser = _PARSER(text)
        # Set only if it contains the escape that Go does not support: scalars are then checked.
        self.text = text if "\\/" in text else ""
        self.lines = lines
        self.nodes = 0
        # Anchor → (value, nodes in it); None while it is being read.
        self.anchors: dict[str, tuple[Any, int] | None] = {}

    def document(self) -> object:
        """Return the first document, None if there is none."""
        self.parser.get_event()
        if not self.parser.check_event(yaml.DocumentStartEvent):
            return None
        self.parser.get_event()
        value = self._value(())
        # Reads one token more: further text is refused, but a next document is not.
        self.parser.get_event()
        return value

    def _value(self, path: tuple[str | int, ...]) -> Any:  # noqa: ANN401 (JSON)
        event = self.parser.get_event()
        self._count(event, 1)
        if self.lines is not None:
            self.lines.setdefault(path, _line(event))
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if len(path) > MAX_DEPTH:
            raise _syntax(event, "nested too deeply")
        before = self.nodes
        if event.anchor:
            self.anchors[event.anchor] = None
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif not self._takes_tag(event.tag):
            raise _syntax(event, f'the tag "{event.tag}" is not supported')
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not self.parser.check_event(yaml.SequenceEndEvent):
                value.append(self._value((*path, len(value))))
            self.parser.get_event()
        else:
            value = self._mapping(path)
        if event.anchor:
            self.anchors[event.anchor] = (value, self.nodes - before)
        return value

    def _mapping(self, path: tuple[str | int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not self.parser.check_event(yaml.MappingEndEvent):
            event = self.parser.get_event()
            self._count(event, 1)
            is_alias = isinstance(event, yaml.AliasEvent)
            if not is_alias and not isinstance(event, yaml.ScalarEvent):
                raise _syntax(event, "a member's name is neither a string nor a number")
            merges = not is_alias and event.value == "<<" and event.implicit[0]
            if merges:
                merged = self._value((*path, "<<"))
                for part in merged if isinstance(merged, list) else [merged]:
                    if not isinstance(part, dict):
                        raise _syntax(event, "only a map can be merged")
                    for name, value in part.items():
                        self._merge(result, name, value, event)
                continue
            key = self._alias(event) if is_alias else self._scalar(event)
            if event.anchor and not is_alias:
                self.anchors[event.anchor] = (key, 1)
            name = _key(key, event)
            if self.lines is not None:
                self.lines[(*path, name)] = _line(event)
            self._set(result, name, self._value((*path, name)), event)
        self.parser.get_event()
        return result

    def _set(self, result: dict[str, Any], name: str, value: object, event: yaml.Event) -> None:
        # Go's strict reader does not let an explicit key override a merged one either.
        if name in result:
            raise CdiError(
                "duplicate-key", f'line {_line(event)}: member "{name}" occurs more than once'
            )
        result[name] = value

    def _merge(self, result: dict[str, Any], name: str, value: object, event: yaml.Event) -> None:
        self._set(result, name, value, event)

    def _takes_tag(self, tag: str | None) -> bool:
        return tag in (None, "!", f"{_TAG}seq", f"{_TAG}map")

    def _alias(self, event: yaml.AliasEvent) -> Any:  # noqa: ANN401 (JSON)
        if event.anchor not in self.anchors:
            raise _syntax(event, f'the anchor "{event.anchor}" is not defined')
        anchored = self.anchors[event.anchor]
        if anchored is None:
            raise _syntax(event, f'the anchor "{event.anchor}" contains itself')
        # An alias costs nothing here, but each walk of the document visits its values again.
        self._count(event, anchored[1])
        return anchored[0]

    def _scalar(self, event: yaml.ScalarEvent) -> object:
        if self.text and event.style == '"' and event.start_mark and event.end_mark:
            raw = self.text[event.start_mark.index : event.end_mark.index]
            if "/" in _ESCAPED.findall(raw):
                raise _syntax(event, "readers in Go do not support the escape \\/")
        return _scalar(event)

    def _count(self, event: yaml.Event, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_VALUES:
            raise _syntax(event, f"more than {MAX_VALUES} values, aliases expanded")


class _ManifestReader(_Reader):
    """A reader of all documents, with YAML's rules for merged keys."""

    def __init__(self, text: str, lines: dict[tuple[str | int, ...], int] | None) -> None:
        super().__init__(text, lines)
        # The id of a map → its merged keys, which may be overridden.
        self.merged: dict[int, set[str]] = {}

    def documents(self) -> list[object]:
        """Return the documents in order."""
        self.parser.get_event()
        documents = []
        while self.parser.check_event(yaml.DocumentStartEvent):
            self.parser.get_event()
            self.anchors.clear()
            self.merged.clear()
            documents.append(self._value(()))
            self.parser.get_event()
        return documents

    def _merge(self, result: dict[str, Any], name: str, value: object, event: yaml.Event) -> None:
        del event
        if name not in result:
            result[name] = value
            self.merged.setdefault(id(result), set()).add(name)

    def _set(self, result: dict[str, Any], name: str, value: object, event: yaml.Event) -> None:
        merged = self.merged.get(id(result), set())
        if name in merged:
            merged.remove(name)
            del result[name]
        super()._set(result, name, value, event)

    def _takes_tag(self, tag: str | None) -> bool:
        del tag
        return True

    def _scalar(self, event: yaml.ScalarEvent) -> object:
        if event.tag is not None and not event.tag.startswith(_TAG):
            return event.value if event.style in ("'", '"') else _plain(event.value)
        return super()._scalar(event)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


def _syntax(event: yaml.Event, problem: str) -> CdiError:
    return CdiError("syntax", f"line {_line(event)}: {problem}")


def _key(key: object, event: yaml.Event) -> str:
    """Return the member name to which a reader in Go converts *key*."""
    if isinstance(key, float):
        text = document.scalar_text(key)
        return {"+Inf": ".inf", "-Inf": "-.inf", "NaN": ".nan"}.get(text, text)
    if isinstance(key, (str, bool, int)):
        return document.scalar_text(key)
    raise _syntax(event, "a member's name is neither a string nor a number")


def _scalar(event: yaml.ScalarEvent) -> object:
    tag = event.tag
    if event.implicit[0]:
        return _plain(event.value)
    if tag in (None, "!", f"{_TAG}str") or event.implicit[1]:
        return event.value
    value = _plain(event.value)
    kinds: dict[str, Any] = {"null": type(None), "bool": bool, "int": int, "float": (float, int)}
    kind = kinds.get(tag.removeprefix(_TAG)) if tag.startswith(_TAG) else None
    if kind is None:
        raise _syntax(event, f'the tag "{tag}" is not supported')
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _syntax(event, f'"{event.value}" does not match its tag')
    return value


def _plain(text: str) -> object:
    """Return the value of an unquoted scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    plain = text if text[0] == "." else text.replace("_", "")
    match = _INTEGER.match(plain)
    if match and len(plain) < _MAX_INTEGER_CHARS:
        base = match.lastgroup or "dec"
        value = int(match["sign"] + match[base], _BASES[base])
        if document.INT64[0] <= value < 2**64:
            return value
    if _FLOAT.match(plain):
        number = float(plain)
        # Go's parser reports an overflow; such a scalar stays a string.
        return text if number in (float("inf"), float("-inf")) else number
    return text
