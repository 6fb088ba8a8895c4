# SPDX-License-Identifier: Apache-2.0
"""What of a recording must differ from one run to the next, and what stands for it.

TABLE is all that is normalised, with the reason; the rest of a file is recorded to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STATE = "run/"  # what the programs keep in /run/gpuruntime
LOG = "log"
ANY = ""


class Rule(NamedTuple):
    """In files whose name begins with *where*, *pattern* becomes *put*."""

    where: str
    pattern: str
    put: str | Callable[[re.Match[str]], str]
    reason: str


def _places(match: re.Match[str]) -> str:
    return re.sub(r"\[\d+, ?\d+\]", '["DEV","INO"]', match[0])


def _first_of(path: str) -> str:
    return Path(path).read_text().strip()


def table(checkout: str) -> tuple[Rule, ...]:
    """Return the rules for a recording of *checkout*, in the order in which they apply."""
    boot = re.escape(_first_of("/proc/sys/kernel/random/boot_id"))
    return (
        Rule(ANY, re.escape(checkout), "$CHECKOUT", "where the checkout is"),
        Rule(ANY, boot, "$BOOT", "the machine's boot, which a restart changes"),
        Rule(
            ANY,
            r"\(\d+\.\d s ago;",
            "($N s ago;",
            "how long ago the driver failed, in an error that is kept for 5 s",
        ),
        Rule(
            "stdout",
            r"(\d+ GPUs?, in )\d+\.\d s",
            r"\1$N s",
            "how long the driver took to answer the doctor",
        ),
        Rule(
            STATE,
            r'"asked":\d+\.\d+,"made":"[0-9a-f]+"',
            '"asked":"TIME","made":"RANDOM"',
            "when the driver was asked, and the mark of that answer",
        ),
        Rule(
            LOG,
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)",
            "$TIME",
            "when a record was written",
        ),
        Rule(
            STATE,
            r'"[\w/$]+\.py": ?\[\d+, ?\d+\]',
            '"$SOURCE":["SIZE","SUM"]',
            "our own source file, by which a program of another version is told: it may move",
        ),
        Rule(
            STATE,
            r"(content\n *)\S+\.py\n *\d+ \d+\n",
            r"\1$SOURCE\n",
            "the same in the file of answers",
        ),
        Rule(
            STATE,
            r'"place", ?\{[^}]*\}',
            _places,
            "device and inode numbers of directories",
        ),
        Rule(
            STATE,
            r"\[\d+, ?\d+, ?\d+, ?\d{9,}, ?\d{9,}\]",
            '["DEV","INO","SIZE","MTIME","CTIME"]',
            "numbers and times of files; the size of a directory is its file system's",
        ),
        Rule(
            STATE,
            r'(\.toml", ?)\d+, ?\d+, ?(\d+), ?\d+, ?\d+\]',
            r'\1"DEV","INO",\2,"MTIME","CTIME"]',
            "numbers and times of the config file",
        ),
        Rule(
            STATE,
            r"(?m)^(stat) \d+ \d+ (\d+) \d+ \d+$",
            r"\1 DEV INO \2 MTIME CTIME",
            "the same in the files for the launcher",
        ),
        Rule(STATE, r"(?m)^(launcher) \d+:\d+$", r"\1 DEV:INO", "numbers of the launcher's file"),
        Rule(
            STATE,
            r"(identity\n *\S+\n *)\d+ \d+ \d+ \d+ \d+\n",
            r"\1DEV INO SIZE MTIME CTIME\n",
            "numbers and times of files in the file of answers",
        ),
        Rule(STATE, r"(place\n *\S+\n *)\d+ \d+\n", r"\1DEV INO\n", "the same of directories"),
        Rule(
            STATE,
            r'("digest": ?")[0-9a-f]+"',
            r'\1DIGEST"',
            "digest of a spec, in which the path of the checkout's hook is",
        ),
    )


class Normaliser:
    """Rules for one checkout."""

    def __init__(self, checkout: str) -> None:
        self.rules = [(rule, re.compile(rule.pattern)) for rule in table(checkout)]

    def __call__(self, name: str, content: bytes) -> bytes:
        """Return what is recorded of *content*, of the file *name* in a case."""
        text = content.decode("latin-1")
        if name.startswith(f"{STATE}replay-"):
            text = spread(content).decode("latin-1")
        for rule, pattern in self.rules:
            if name.startswith(rule.where):
                text = pattern.sub(rule.put, text)
        return text.encode("latin-1")


def spread(content: bytes) -> bytes:
    """Return a replay file with one field a line, indented, and no lengths.

    A length counts the bytes of the checkout's path.
    """
    at = re.match(rb"(?:[a-z].*\n)*", content)
    assert at is not None
    fields = _fields(content[at.end() :])
    return content if fields is None else at[0] + b"".join(_spread(fields, b""))


def _spread(fields: list[bytes], indent: bytes) -> list[bytes]:
    found = []
    for field in fields:
        inner = _fields(field)
        if inner:
            found += [indent + b"-\n", *_spread(inner, indent + b"  ")]
        else:
            found.append(indent + field + b"\n")
    return found


def _fields(content: bytes) -> list[bytes] | None:
    """Return the fields that *content* is made of: a length, a colon, bytes, a line feed."""
    found = []
    while content:
        number, colon, rest = content.partition(b":")
        if not colon or not number.isdigit() or rest[int(number) : int(number) + 1] != b"\n":
            return None
        found.append(rest[: int(number)])
        content = rest[int(number) + 1 :]
    return found
