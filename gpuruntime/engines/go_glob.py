# SPDX-License-Identifier: Apache-2.0
"""Path patterns with the rules of Go's filepath.Match and filepath.Glob, which engines use.

Unlike in Python's modules, "*" matches a leading dot, "^" negates a set and a backslash quotes
the next character.
"""

from __future__ import annotations

import os
import re

_META = re.compile(r"[*?\[\\]")
_TOKEN = re.compile(
    r"(?P<any>\*)|(?P<one>\?)|\\(?P<quoted>.)|\[(?P<not>\^?)(?P<set>(?:[^\]\\-]|\\.|-(?!\]))+)\]"
    r"|(?P<literal>[^*?\[\\])",
    re.DOTALL,
)
_RANGE = re.compile(r"(?:\\(.)|([^\\-]))(?:-(?:\\(.)|([^\\-])))?", re.DOTALL)


def has_wildcards(path: str) -> bool:
    """Return whether *path* contains characters with a special meaning in a pattern."""
    return _META.search(path) is not None


def check(pattern: str) -> None:
    """Raise ValueError if *pattern* is malformed."""
    for part in pattern.split("/"):
        _regex(part)


def is_match(pattern: str, path: str) -> bool:
    """Return whether *pattern* matches *path* as a whole; *pattern* must be well-formed."""
    patterns, names = pattern.split("/"), path.split("/")
    return len(patterns) == len(names) and all(
        _regex(part).fullmatch(name) is not None
        for part, name in zip(patterns, names, strict=True)
    )


def paths(pattern: str) -> list[str]:
    """Return the paths that the absolute, well-formed *pattern* matches.

    A directory that cannot be read has no matches.
    """
    matches = ["/"]
    for part in pattern.split("/")[1:]:
        regex = _regex(part)
        if _META.search(part):
            matches = [
                os.path.join(directory, name)
                for directory in matches
                for name in _names(directory)
                if regex.fullmatch(name)
            ]
        else:
            matches = [os.path.join(directory, part) for directory in matches]
    return [path for path in matches if os.path.lexists(path)]


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for *pattern*, one path component; raise ValueError."""
    expression = ""
    position = 0
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            raise ValueError(f'"{pattern}" is not a valid pattern')
        position = token.end()
        if token["any"]:
            expression += "[^/]*"
        elif token["one"]:
            expression += "[^/]"
        elif token["set"]:
            expression += _set(pattern, token["not"], token["set"])
        else:
            expression += re.escape(token["quoted"] or token["literal"])
    return re.compile(expression, re.DOTALL)


def _set(pattern: str, negation: str, text: str) -> str:
    """Return the set *text*, of characters and ranges, as a set of a regular expression."""
    ranges = []
    position = 0
    while position < len(text):
        part = _RANGE.match(text, position)
        if part is None:
            raise ValueError(f'"{pattern}" is not a valid pattern')
        position = part.end()
        low = part[1] or part[2]
        high = part[3] or part[4] or low
        if low <= high:
            ranges.append(f"{re.escape(low)}-{re.escape(high)}")
    if not ranges:
        # A range whose end is before its start matches nothing.
        return "[^/]" if negation else "(?!)"
    return f"[{negation}{''.join(ranges)}]"
