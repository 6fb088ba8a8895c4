# SPDX-License-Identifier: Apache-2.0
"""Fuzz target for the C parsers of the launcher, built with sanitisers and compared with Python.

The twin of the command-line parser is gpuruntime/oci/argv.py; those of the other parsers are here.
"""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

from gpuruntime.oci import argv

HERE = Path(__file__).parent
TREE = HERE.parents[1]
CASES = TREE / "tests" / "data" / "argv" / "cases.json"
CASES_AT_A_TIME = 2000
# The limit of launcher/text.h, without the last NUL: longer texts may be cut.
LONGEST_TEXT = (8 << 10) - 2
# The parsers in the C files; functions that make system calls have their own tests.
FUNCTIONS = (
    *("find_option", "parse", "parse_create", "equal", "until", "starts_with"),
    *("read_names", "read_lists", "is_plain", "append_value", "read_values", "read_interpreter"),
    *("learn", "digit", "hides", "is_at", "begins", "found_in"),
)
OPTIONS = (
    *("-std=gnu11", "-g", "-O1", "--coverage", "-Wno-unused-function"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *(f'-D{name}="/x"' for name in ("LIBDIR", "PYTHON", "CLI_PYTHON", "VERSION")),
)
WORDS = (
    *(f"{dash}{name}" for name in argv.GLOBAL_OPTIONS for dash in ("-", "--")),
    *(f"{dash}{name}" for name in argv.RUN_OPTIONS for dash in ("-", "--")),
    *("--bundle=/b", "-b=", "-f=x", "--config=", "-bX", "--pid-file=p"),
    *(
        "--root=/x",
        "--debug=false",
        "--version=false",
        "create",
        "run",
        "state",
        "-",
        "--",
        "---x",
        "",
        "é",
    ),
)
LINES = (
    *("runtime runc\n", "runtime /usr/bin/crun\n", "creates pass\n", "creates python\n"),
    *("word NVIDIA_\n", "word x\n", "end\n", "end", "runtime \n", "runtime x", "word \n", "\n"),
)
INTERPRETER = (
    *("gpuruntime-interpreter 1\n", "library @/lib\n", "python @/bin/python\n", "python -s\n"),
    *("slow /slow\n", "slow -x@/y@\n", "end\n", "end", "python \n", 'python "\n', "slow x", "\n"),
    *("python @/@/\n", "library /l\n", f"slow /{'@/' * 1500}\n", f"library /{'x' * 9000}\n"),
)
GOOD_INTERPRETER = (
    "gpuruntime-interpreter 1\n",
    *("library @/lib\n", "python @/bin/python\n", "python -s\n", "slow /slow\n", "end\n"),
)
UNUSABLE = (b"a", b"\\u", b"x" * 257)
TRIGGERS = (b"NVIDIA_", b"nvidia.com/", b"NVIDIA", b"ab", b"aa", *UNUSABLE)
PIECES = (
    *(b"NVIDIA_", b"NVIDIA", b"nvidia.com/", b"nvidia.com", b"a", b"b", b"aa", b"N", b"\\", b"u"),
    *(b"\\u004e", b"\\u003c", b"\\u00", b"\\/", b"/", b'"', b"\0", b"\xff", b" " * 7, b"\\u002F"),
)


def build(place: Path) -> Path:
    """Return the program; build it in *place* at the first call."""
    program = place / "harness"
    if not program.exists():
        subprocess.run(
            ["gcc", *OPTIONS, "-o", str(program), str(HERE / "launcher_harness.c")],
            cwd=place, check=True, capture_output=True,
        )  # fmt: skip
    return program


def compare(rng: random.Random, texts: list[Any], place: Path) -> None:
    """Parse many cases in C and in Python; raise on a difference or a sanitiser report."""
    del texts
    corpus = [case["arguments"] for case in json.loads(CASES.read_text())]
    cases, expected = [], []
    for _ in range(CASES_AT_A_TIME):
        kind, data, expected_line = rng.choices(
            (_argv_case, _companion_case, _interpreter_case, _search_case), (4, 1, 1, 4)
        )[0](rng, corpus)
        cases.append((kind, data))
        expected.append(expected_line)
    file = place / "cases"
    file.write_bytes(b"".join(kind + struct.pack("<I", len(d)) + d for kind, d in cases))
    done = subprocess.run(
        [build(place), file],
        cwd=place,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=60,
    )
    if done.returncode != 0:
        raise AssertionError(done.stderr[:2000])
    for case, line, expected_line in zip(cases, done.stdout.split("\n"), expected, strict=False):
        if expected_line is not None and line != expected_line:
            raise AssertionError(f"{case}: {line}, not {expected_line}")


def _argv_case(rng: random.Random, corpus: list[list[str]]) -> tuple[bytes, bytes, str | None]:
    words = list(rng.choice(corpus))
    for _ in range(rng.randint(0, 3)):
        words.insert(rng.randint(0, len(words)), rng.choice(WORDS))
    data = "".join(f"{word}\0" for word in words).encode("utf-8", "surrogateescape")
    return b"a", data, _words(words)


def _words(words: list[str]) -> str | None:
    """Return the expected output for *words*; None where the launcher may leave them to Python."""
    try:
        options, rest = argv._read(words, argv.GLOBAL_OPTIONS)
    except argv._UnknownError:
        return None
    queries = [name for name, _ in options if argv.GLOBAL_OPTIONS[name] == argv.QUERY]
    creates = not queries and bool(rest) and rest[0] in argv.CREATING
    prefix = f"1 {creates:d} {any(name in argv.VERSION_NAMES for name in queries):d}"
    if not creates:
        return f"{prefix} 0"
    if any(re.match("-[bf][^=]", word) for word in rest):
        # Short options of crun with an attached value: only Python parses them.
        return None
    command = argv.parse(words)
    if not (command.understood and command.creates):
        return f"{prefix} 0"
    return f"{prefix} 1 {command.bundle or '~'} {command.config or '~'}"


def _companion_case(rng: random.Random, _: object) -> tuple[bytes, bytes, str]:
    good = ("runtime runc\n", "creates pass\n", "word NVIDIA_\n", "word x\n", "end\n")
    text = _spoiled(rng, good, LINES)
    match = re.fullmatch(
        r"((?:runtime [^\n]+\n)*)creates (python\n|pass\n((?:word [^\n]+\n)*))end\n", text
    )
    if match is None:
        return b"c", text.encode(), "-"
    words = "-" if match[3] is None else _names(match[3])
    return b"c", text.encode(), f"{_names(match[1])} ; {words}"


def _names(lines: str) -> str:
    return " | ".join(line.partition(" ")[2] for line in lines.splitlines())


def _interpreter_case(rng: random.Random, _: object) -> tuple[bytes, bytes, str]:
    text = _spoiled(rng, GOOD_INTERPRETER, INTERPRETER)
    value = r"[ !#-\[\]-~]+"
    match = re.fullmatch(
        rf"gpuruntime-interpreter 1\nlibrary ({value})\n((?:python {value}\n){{1,16}})"
        rf"((?:slow {value}\n){{0,16}})end\n",
        text,
    )
    if match is None:
        return b"i", text.encode(), "-"
    library, python, slow = (part.replace("@/", "/h/") for part in match.groups())
    words, others = _names(python).split(" | "), _names(slow or python).split(" | ")
    joined = "\\n".join(others)
    # In the launcher, a NUL follows each word but the last.
    sizes = (len(library) + 1, sum(map(len, words)) + len(words), len(joined))
    if not all(part.startswith("/") for part in (library, words[0], others[0])):
        return b"i", text.encode(), "-"
    if max(sizes) > LONGEST_TEXT:
        return b"i", text.encode(), "-"
    return b"i", text.encode(), f"{library} | {' | '.join(words)} ; {joined}"


def _spoiled(rng: random.Random, good: tuple[str, ...], lines: tuple[str, ...]) -> str:
    """Return the text of *good* with random lines removed and some of *lines* inserted."""
    chosen = list(good)
    for _ in range(rng.choice((0, 1, 1, 2, 5, 20))):
        place = rng.randint(0, len(chosen))
        if rng.random() < 0.3:
            del chosen[place : place + 1]
        else:
            chosen.insert(place, rng.choice(lines))
    return "".join(chosen)


def _search_case(rng: random.Random, _: object) -> tuple[bytes, bytes, str]:
    words = rng.sample(TRIGGERS, rng.randint(0, len(TRIGGERS)))
    text = b"".join(rng.choices(PIECES, k=rng.randint(0, 9)))
    data = b"".join(word + b"\0" for word in words) + b"\0" + text
    if not set(words).isdisjoint(UNUSABLE):
        return b"w", data, "-1"
    # An escape of a letter, a digit or one of _-./=: may hide a word.
    escapes = re.findall(rb"\\(/|u00[2-7][0-9A-Fa-f])", text)
    hidden = any(
        escape == b"/" or re.fullmatch(rb"[A-Za-z0-9_\-./=:]", bytes([int(escape[3:], 16)]))
        for escape in escapes
    )
    return b"w", data, f"{hidden or any(word in text for word in words):d}"


def covered(place: Path) -> dict[str, tuple[int, int]]:
    """Return the executed and the total number of lines of the parsers."""
    done = subprocess.run(
        ["gcov", "--no-output", "--function-summaries", "harness-launcher_harness"],
        cwd=place, capture_output=True, text=True, check=True,
    )  # fmt: skip
    summaries = re.findall(r"Function '(\w+)'\nLines executed:([\d.]+)% of (\d+)", done.stdout)
    counts = {
        name: (round(float(share) * int(total) / 100), int(total))
        for name, share, total in summaries
    }
    parts = [counts[name] for name in FUNCTIONS]
    return {"gpuruntime/launcher": (sum(a for a, _ in parts), sum(b for _, b in parts))}
