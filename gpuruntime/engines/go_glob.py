# SPDX-License-Identifier: Apache-2.0
"""Path patterns as Go's filepath.Match and filepath.Glob read them, which engines use.

Unlike those of Python's modules, "*" matches a leading dot, "^" negates a set and a backslash
quotes the next character.
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
    """Return whether *path*, taken as a pattern, would match other paths than itself."""
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

    A directory that cannot be read has no match.
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
    """Return the regular expression of a *pattern* of one name; raise ValueError."""
    expression = ""
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise ValueError(f'"{pattern}" is not a valid pattern')
        at = token.end()
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
    """Return *text*, characters and ranges, as a set of a regular expression."""
    ranges = []
    at = 0
    while at < len(text):
        part = _RANGE.match(text, at)
        if part is None:
            raise ValueError(f'"{pattern}" is not a valid pattern')
        at = part.end()
        low = part[1] or part[2]
        high = part[3] or part[4] or low
        if low <= high:
            ranges.append(f"{re.escape(low)}-{re.escape(high)}")
    if not ranges:
        # A range from a character to an earlier one has no match.
        return "[^/]" if negation else "(?!)"
    return f"[{negation}{''.join(ranges)}]"
