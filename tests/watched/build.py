# SPDX-License-Identifier: Apache-2.0
"""Builds the watched launcher, which the simulated host has in place of the other one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpuruntime import __version__

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
WATCHED = TREE / "build" / "watched" / "launcher"
PYTHON = "/usr/bin/python3"
OPTIONS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-static")


def build() -> None:
    """Have the watched launcher up to date; raise CalledProcessError."""
    sources = [HERE / "launcher.c", *(TREE / "gpuruntime" / "launcher").glob("*.[ch]")]
    made = WATCHED.stat().st_mtime if WATCHED.exists() else 0
    if all(source.stat().st_mtime < made for source in sources):
        return
    WATCHED.parent.mkdir(parents=True, exist_ok=True)
    constants = {
        "LIBDIR": TREE,
        "PYTHON": PYTHON,
        "CLI_PYTHON": Path(sys.prefix) / "bin" / "python",
        "VERSION": __version__,
        "WATCHER": HERE / "watcher.py",
    }
    new = WATCHED.with_suffix(f".{os.getpid()}")
    subprocess.run(
        [
            *("gcc", *OPTIONS, "-o", new, HERE / "launcher.c"),
            *(f'-D{name}="{value}"' for name, value in constants.items()),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    new.rename(WATCHED)
