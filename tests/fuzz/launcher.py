# SPDX-License-Identifier: Apache-2.0
"""Fuzz target for the launcher's parsers in C, built with sanitisers; compared with their twins.

The command line is also read by gpuruntime/oci/argv.py, the companion file by a few lines here.
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
# Parsers of the C files: others need a kernel around them, and have tests of their own.
FUNCTIONS = ("find_option", "parse", "read_candidates", "equal", "until", "starts_with")
OPTIONS = (
    *("-std=gnu11", "-g", "-O1", "--coverage", "-Wno-unused-function"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *(f'-D{name}="/x"' for name in ("LIBDIR", "PYTHON", "CLI_PYTHON", "VERSION")),
)
WORDS = (
    *(f"{dash}{name}" for name in argv.GLOBAL_OPTIONS for dash in ("-", "--")),
    *(
        "--root=/x",
        "--debug=false",
        "--version=false",
        "create",
        "state",
        "-",
        "--",
        "---x",
        "",
        "é",
    ),
)
LINES = (
    "runtime runc\n",
    "runtime /usr/bin/crun\n",
    "end\n",
    "end",
    "runtime \n",
    "runtime x",
    "\n",
)


def build(place: Path) -> Path:
    """Return the program, built in *place* once."""
    program = place / "harness"
    if not program.exists():
        subprocess.run(
            ["gcc", *OPTIONS, "-o", str(program), str(HERE / "launcher_harness.c")],
            cwd=place, check=True, capture_output=True,
        )  # fmt: skip
    return program


def compare(rng: random.Random, texts: list[Any], place: Path) -> None:
    """Read many cases in C and here; raise if one differs, or if a sanitiser says something."""
    del texts
    known = [case["arguments"] for case in json.loads(CASES.read_text())]
    cases, expected = [], []
    for _ in range(CASES_AT_A_TIME):
        if rng.random() < 0.7:
            words = list(rng.choice(known))
            for _ in range(rng.randint(0, 3)):
                words.insert(rng.randint(0, len(words)), rng.choice(WORDS))
            data = "".join(f"{word}\0" for word in words).encode("utf-8", "surrogateescape")
            cases.append((b"a", data))
            expected.append(_words(words))
        else:
            text = "".join(rng.choices(LINES, k=rng.randint(0, 5))) + rng.choice(("", "end\n"))
            cases.append((b"c", text.encode()))
            expected.append(_candidates(text))
    file = place / "cases"
    file.write_bytes(b"".join(kind + struct.pack("<I", len(d)) + d for kind, d in cases))
    done = subprocess.run(
        [build(place), file], cwd=place, capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode != 0:
        raise AssertionError(done.stderr[:2000])
    for case, line, wanted in zip(cases, done.stdout.split("\n"), expected, strict=False):
        if wanted is not None and line != wanted:
            raise AssertionError(f"{case}: {line}, not {wanted}")


def _words(words: list[str]) -> str | None:
    """Return what the launcher is to say of *words*; None where it may err towards Python."""
    try:
        options, rest = argv._read(words, argv.GLOBAL_OPTIONS)
    except argv._UnknownError:
        return None
    queries = [name for name, _ in options if argv.GLOBAL_OPTIONS[name] == argv.QUERY]
    creates = not queries and bool(rest) and rest[0] == "create"
    return f"1 {creates:d} {any(name in argv.VERSION_NAMES for name in queries):d}"


def _candidates(text: str) -> str:
    names = re.fullmatch(r"((?:runtime [^\n]+\n)*)end\n", text)
    if names is None:
        return "-"
    return " | ".join(line.removeprefix("runtime ") for line in names[1].splitlines())


def covered(place: Path) -> dict[str, tuple[int, int]]:
    """Return the executed lines, and all, of the parsers."""
    done = subprocess.run(
        ["gcov", "--no-output", "--function-summaries", "harness-launcher_harness"],
        cwd=place, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.findall(r"Function '(\w+)'\nLines executed:([\d.]+)% of (\d+)", done.stdout)
    counts = {name: (round(float(share) * int(of) / 100), int(of)) for name, share, of in found}
    parts = [counts[name] for name in FUNCTIONS]
    return {"gpuruntime/launcher": (sum(a for a, _ in parts), sum(b for _, b in parts))}
