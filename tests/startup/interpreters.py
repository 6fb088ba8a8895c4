# SPDX-License-Identifier: Apache-2.0
"""The interpreters of this machine that can run the start path, one of each minor version.

Those of pyenv, those on PATH, where pyenv has slow scripts, and those of the Debian suites that
`make test-newer-engines` has unpacked, which run behind their own loader.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).parents[2]
SUITES = TREE / "build" / "newer-engines"
MINORS = range(9, 15)
# As the launcher starts it.
ISOLATED = ("-I", "-S", "-B", "-X", "utf8")
_ASK = "import sys; print(*sys.version_info[:2], sys._base_executable)"


@functools.cache
def found() -> dict[int, tuple[str, ...]]:
    """Return the minor version → the words that start it."""
    interpreters: dict[int, tuple[str, ...]] = {}
    for name, words in _candidates():
        # A minor version that is there already needs no other interpreter.
        if name in {f"python3.{minor}" for minor in interpreters}:
            continue
        done = subprocess.run([*words, *ISOLATED, "-c", _ASK], capture_output=True, text=True,
                              check=False)  # fmt: skip
        # A name on PATH may be a script that finds nothing behind it.
        if done.returncode == 0:
            major, minor, program = done.stdout.strip().split(" ", 2)
            if major == "3":
                real = words if len(words) > 1 else (program,)
                interpreters.setdefault(int(minor), real)
    return interpreters


def _candidates() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of a program and the words that start it."""
    yield "python3", ("/usr/bin/python3",)
    pyenv = Path(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")))
    for minor in MINORS:
        name = f"python3.{minor}"
        for path in sorted(pyenv.glob(f"versions/*/bin/{name}")):
            yield name, (str(path),)
        for directory in os.get_exec_path():
            program = shutil.which(name, path=directory)
            if program is not None:
                yield name, (program,)
        for path in sorted(SUITES.glob(f"*/root/usr/bin/{name}")):
            root = path.parents[2]
            for loader in sorted(root.glob("usr/lib64/ld-linux-*")):
                libraries = [str(place) for place in root.glob("usr/lib/*-linux-gnu")]
                yield (
                    name,
                    (
                        *(str(loader), "--library-path", ":".join(libraries)),
                        *("--argv0", str(path), str(path)),
                    ),
                )
