# SPDX-License-Identifier: Apache-2.0
"""Hooks with something changed in them: code that runs first in their Python, another launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
SOURCES = TREE / "gpuruntime" / "launcher"
LAUNCHER = TREE / "build" / "launcher"
START_PYTHON = "/usr/bin/python3"
# As the launcher has it.
ISOLATED = ("-I", "-S", "-B", "-X", "utf8")
NAME = "gpu-cdi-hook"
# The last line alone: the bytecode of a role would replace the modules that were changed.
_FIRST = f"""\
import sys
code, sys.argv = sys.argv[{len(ISOLATED) + 2}], ["-c", *sys.argv[{len(ISOLATED) + 3}:]]
sys.path.append({str(TREE)!r})
"""
_FLAGS = (
    *("-std=c11", "-Os", "-nostdlib", "-static", "-ffreestanding", "-fno-pie", "-no-pie"),
    *("-fno-stack-protector", "-fno-asynchronous-unwind-tables"),
    *("-fno-tree-loop-distribute-patterns", "-Wl,-z,noseparate-code", "-s"),
)


def make(directory: Path, before: str, *, changes: Mapping[str, str] | None = None) -> Path:
    """Return the path of a hook, made in *directory*, whose Python runs *before* first.

    *changes* are made in the C source of its launcher; each text is there once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / NAME
    if changes:
        _compile(directory / "launcher", changes, program)
    else:
        shutil.copy2(LAUNCHER, program)
    first = directory / "first.py"
    first.write_text(f"{_FIRST}{before}\nexec(code.splitlines()[-1])\n")
    words = (START_PYTHON, *ISOLATED, str(first))
    lines = "".join(f"python {word}\n" for word in words)
    path = directory / "launcher.interpreter"
    path.write_text(f"gpuruntime-interpreter 1\nlibrary {TREE}\n{lines}end\n")
    path.chmod(0o644)
    return program


def _compile(sources: Path, changes: Mapping[str, str], program: Path) -> None:
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    for old, new in changes.items():
        found = [path for path in sources.iterdir() if old in path.read_text()]
        assert len(found) == 1, f"{old}: in {found}"
        text = found[0].read_text()
        assert text.count(old) == 1, f"{old}: {text.count(old)} times in {found[0].name}"
        found[0].write_text(text.replace(old, new))
    values = {"LIBDIR": TREE, "PYTHON": START_PYTHON, "CLI_PYTHON": "/none", "VERSION": "0"}
    constants = [f'-D{name}="{value}"' for name, value in values.items()]
    command = ["gcc", *_FLAGS, *constants, "-o", str(program), str(sources / "launcher.c")]
    subprocess.run(command, check=True, env={**os.environ, "LC_ALL": "C"})
