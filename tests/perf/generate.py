# SPDX-License-Identifier: Apache-2.0
"""Count the instructions of `cdi generate` on simulated hosts.

They are held against those of importing what any such command imports, in the same interpreter.
A forked child's count begins with what its parent had done before: what the child did itself is
taken to be all but the imports, which is more than it was.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).parents[2]
SIMHOST = TREE / "tests" / "simhost" / "simhost.py"
PYTHON = TREE / ".venv" / "bin" / "python"
REAL_ROOT = TREE / "build" / "driver-root" / "550"
IMPORTS = "import click, yaml, pynvml"
FEW_LIMIT, MANY_LIMIT = 2.0, 8.5
GENERATE = ("-m", "gpuruntime", "cdi", "generate", "--hook-path", "/usr/bin/gpu-cdi-hook")


def instructions(arguments: list[str], *options: str, inherited: int = 0) -> int:
    """Return how many instructions Python takes for *arguments* on a host with *options*.

    *inherited* is the part of a child's count that is its parent's.
    """
    ran = subprocess.run(
        [
            *(sys.executable, str(SIMHOST), "run", *options, "--"),
            *("valgrind", "--tool=callgrind", "--trace-children=yes"),
            *("--callgrind-out-file=/dev/null", str(PYTHON), *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=TREE,
    )
    counts = re.findall(r"I\s+refs:\s+([\d,]+)", ran.stderr)
    if ran.returncode != 0 or not counts:
        raise RuntimeError(ran.stderr[-2000:])
    # The process itself is the last to end.
    *children, itself = (int(count.replace(",", "")) for count in counts)
    return itself + sum(child - inherited for child in children)


def generate(inherited: int, *options: str) -> int:
    """Return the instructions of `cdi generate` on a host with *options*."""
    return instructions(list(GENERATE), *options, inherited=inherited)


def main() -> None:
    """Print the numbers and ratios; fail above a limit."""
    floor = instructions(["-c", IMPORTS])
    ours = instructions(["-c", "import gpuruntime.cli.main, gpuruntime.cli.cdi_generate"])
    print(f"{IMPORTS}: {floor:,} instructions")
    real = ("--driver-root", str(REAL_ROOT)) if REAL_ROOT.is_dir() else ()
    what = "the real 550 tree" if real else 'a simulated tree, as there was no "make driver-root"'
    few = generate(ours, "--gpus", "8", *real)
    print(f"8 GPUs, {what}: {few:,}: {few / floor:.2f} x that (limit {FEW_LIMIT})")
    eight = generate(ours, "--gpus", "8", "--mig", "all:7")
    many = generate(ours, "--gpus", "64", "--mig", "all:7")
    ratio = (many - floor) / (eight - floor)
    print(
        f"8 x 7 MIG devices: {eight:,}; 64 x 7: {many:,}: above the imports "
        f"{ratio:.2f} x those of 8 x 7 (limit {MANY_LIMIT})"
    )
    sys.exit(few / floor > FEW_LIMIT or ratio > MANY_LIMIT)


if __name__ == "__main__":
    main()
